"""What users import: clients, sandboxes, their files and processes, results. `dsec` re-exports it."""

from dsec.sdk._generated.sync import Client, Events, Files, Images, Nodes, Process, Sandbox
from dsec.sdk._later import Later, function
from dsec.sdk.client import AsyncClient, Stopped
from dsec.sdk.collections import AsyncEvents, AsyncImages, AsyncNodes
from dsec.sdk.files import AsyncFiles, Transfer
from dsec.sdk.processes import AsyncProcess
from dsec.sdk.results import ExecResult, FileEntry, Output, Page
from dsec.sdk.sandbox import AsyncSandbox

__all__ = [
    "AsyncClient",
    "AsyncEvents",
    "AsyncFiles",
    "AsyncImages",
    "AsyncNodes",
    "AsyncProcess",
    "AsyncSandbox",
    "Client",
    "Events",
    "ExecResult",
    "FileEntry",
    "Files",
    "Images",
    "Later",
    "Nodes",
    "Output",
    "Page",
    "Process",
    "Sandbox",
    "Stopped",
    "Transfer",
    "function",
]
