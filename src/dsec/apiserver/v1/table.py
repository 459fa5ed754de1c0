"""The HTTP table of docs/http.md: the one place where routes are listed."""

from __future__ import annotations

from dsec.api import errors as e
from dsec.api import types as t
from dsec.apiserver.v1.exchange import BYTES, NDJSON
from dsec.apiserver.v1.handlers import files, other, processes, sandboxes
from dsec.apiserver.v1.handlers.files import TAR
from dsec.apiserver.v1.route import Query, Route

EXEC_BODY = 72 << 20
"""48 MiB of stdin as base64 are 64 MiB, and the rest of the request."""

_BOX = "/v1/sandboxes/{id}"
_PROCESS = _BOX + "/processes/{p}"
_FILES = _BOX + "/files"

_CREATE = (e.InvalidRequest, e.Unsupported, e.ImageError, e.Conflict, e.QuotaExceeded, e.NoCapacity, e.DeadlineExceeded)
_GUEST = (e.InvalidRequest, e.NotFound, e.Conflict, e.SandboxGone)
_FILE = (
    *_GUEST,
    e.FileNotFound,
    e.FileDenied,
    e.FileIsDirectory,
    e.FileNotDirectory,
    e.FileExists,
    e.NotRegularFile,
    e.InvalidPath,
    e.NoSpace,
)

_path = Query("path", "bytes", "Absolute path in the sandbox, percent-encoded bytes.", required=True)
_user = Query("user", "text", "Act as this user of the sandbox: name, uid, name:group or uid:gid.")
_mode = Query("mode", "octal", "File mode, octal, such as 0644.")
_follow_link = Query("follow", "bool", "Follow a symlink at the path's end.")
_limit = Query("limit", "int", "At most so many items, 1 to 1000.")

ROUTES: tuple[Route, ...] = (
    Route(
        method="POST", path="/v1/sandboxes", handler=sandboxes.create, name="createSandbox",
        summary="Create a sandbox; answers when it runs.",
        request=t.CreateSandbox, response=t.SandboxRecord, status=201, errors=_CREATE,
    ),
    Route(
        method="POST", path="/v1/sandboxes:batch", handler=sandboxes.batch, name="createBatch",
        summary="Create many sandboxes; one line for each as it becomes ready or fails. Going away cancels what was not delivered.",
        request=t.CreateBatch, response=t.BatchItem, response_media=NDJSON, errors=_CREATE,
    ),
    Route(
        method="POST", path="/v1/sandboxes:stop", handler=sandboxes.stop_many, name="stopSandboxes",
        summary="Stop sandboxes by ids, by the request that creates them, or by labels.",
        request=t.StopRequest, response=t.StopResponse, errors=(e.InvalidRequest,),
    ),
    Route(
        method="GET", path="/v1/sandboxes", handler=sandboxes.page, name="listSandboxes",
        summary="List sandboxes, newest first: the living, unless `state` asks.",
        response=t.SandboxPage, errors=(e.InvalidRequest,),
        query=(
            Query("state", "text", "A state, or `all`."),
            Query("label", "text", "name=value; must all match.", many=True),
            Query("job", "text", "Only those of this job."),
            _limit,
            Query("cursor", "text", "`next_cursor` of the page before."),
        ),
    ),
    Route(
        method="GET", path=_BOX, handler=sandboxes.get, name="getSandbox",
        summary="A sandbox's record, also when it has ended.", response=t.SandboxRecord, errors=(e.NotFound,),
    ),
    Route(
        method="PATCH", path=_BOX, handler=sandboxes.update, name="setTimeouts",
        summary="Change a sandbox's time limits.",
        request=t.TimeoutUpdate, response=t.SandboxRecord, errors=(e.InvalidRequest, e.NotFound, e.SandboxGone),
    ),
    Route(
        method="DELETE", path=_BOX, handler=sandboxes.stop, name="stopSandbox",
        summary="Stop a sandbox; answers when nothing of it is left.", response=t.SandboxRecord, errors=(e.NotFound,),
    ),
    Route(
        method="GET", path=_BOX + "/usage", handler=sandboxes.usage, name="usage",
        summary="What a sandbox uses now. Does not count as activity.",
        response=t.Usage, errors=(e.NotFound, e.SandboxGone),
    ),
    Route(
        method="POST", path=_BOX + "/exec", handler=processes.run, name="exec", body_limit=EXEC_BODY,
        summary="Run a command to its end. A timeout is an answer with reason `timeout`.",
        request=t.ExecRequest, response=t.ExecResponse, errors=(*_GUEST, e.CommandNotStarted, e.Unsupported),
    ),
    Route(
        method="POST", path=_BOX + "/processes", handler=processes.start, name="startProcess", body_limit=EXEC_BODY,
        summary="Start a process; answers when it runs.",
        request=t.ExecRequest, response=t.ProcessInfo, status=201, errors=(*_GUEST, e.CommandNotStarted, e.Unsupported),
    ),
    Route(
        method="GET", path=_BOX + "/processes", handler=processes.listing, name="listProcesses",
        summary="Processes started through the API, living and recently ended.", response=t.ProcessList, errors=_GUEST,
    ),
    Route(
        method="GET", path=_PROCESS, handler=processes.get, name="getProcess",
        summary="A process by id, pid, or `req:` and its request id.", response=t.ProcessInfo, errors=_GUEST,
    ),
    Route(
        method="GET", path=_PROCESS + "/wait", handler=processes.wait, name="waitProcess",
        summary="Wait for a process's end, at most `timeout` seconds (an hour).",
        query=(Query("timeout", "float", "Seconds."),), response=t.ProcessInfo, errors=_GUEST,
    ),
    Route(
        method="POST", path=_PROCESS + "/signal", handler=processes.signal, name="signalProcess",
        summary="Send a signal; `tree` with KILL ends everything the process started.",
        request=t.SignalRequest, errors=_GUEST,
    ),
    Route(
        method="GET", path=_PROCESS + "/stream", handler=processes.stream, name="streamProcess",
        summary="WebSocket. Server: binary (u8 channel, u64le offset, bytes); text gap, result, running or error."
        " Client: binary is stdin, text {\"stdin\":\"close\"}.",
        query=(
            Query("since_stdout", "int", "First offset wanted of stdout."),
            Query("since_stderr", "int", "First offset wanted of stderr."),
            Query("follow", "bool", "Go on until the process ends (true)."),
        ),
        status=101, errors=_GUEST,
    ),
    Route(
        method="GET", path=_FILES, handler=files.read, name="readFile", summary="Read a file.",
        query=(_path, Query("offset", "int", "First byte."), Query("limit", "int", "Bytes at most."), _user),
        response_media=BYTES, errors=_FILE,
    ),
    Route(
        method="PUT", path=_FILES, handler=files.write, name="writeFile",
        summary="Write a file, whole or not at all; or append to it.",
        query=(
            _path, _mode, _user,
            Query("append", "bool", "Append in place (false)."),
            Query("parents", "bool", "Make missing directories (true)."),
        ),
        request_media=BYTES, response=t.FileWritten, errors=_FILE,
    ),
    Route(
        method="GET", path=_FILES + ":stat", handler=files.stat, name="statFile", summary="Describe a file.",
        query=(_path, _user, _follow_link), response=t.FileEntry, errors=_FILE,
    ),
    Route(
        method="GET", path=_FILES + ":list", handler=files.listing, name="listFiles", summary="List a directory.",
        query=(_path, _user, Query("depth", "int", "Levels, 1 to 64.")), response=t.FileList, errors=_FILE,
    ),
    Route(
        method="POST", path=_FILES + ":mkdir", handler=files.mkdir, name="makeDirectory", summary="Make a directory.",
        query=(_path, _user, _mode, Query("parents", "bool", "Make missing parents; an existing one is fine.")), errors=_FILE,
    ),
    Route(
        method="POST", path=_FILES + ":remove", handler=files.remove, name="removeFile",
        summary="Remove a file or directory.",
        query=(_path, _user, Query("recursive", "bool", "With all that is in it.")),
        errors=(*_FILE, e.DirectoryNotEmpty),
    ),
    Route(
        method="POST", path=_FILES + ":move", handler=files.move, name="moveFile", summary="Rename a file or directory.",
        query=(
            _path, _user,
            Query("to", "bytes", "The new path.", required=True),
            Query("overwrite", "bool", "Replace what is there (true)."),
        ),
        errors=_FILE,
    ),
    Route(
        method="POST", path=_FILES + ":chmod", handler=files.chmod, name="changeMode", summary="Change a file's mode.",
        query=(_path, _user, _mode), errors=_FILE,
    ),
    Route(
        method="POST", path=_FILES + ":chown", handler=files.chown, name="changeOwner", summary="Change a file's owner.",
        query=(_path, _user, _follow_link, Query("owner", "text", "As `user`.", required=True)), errors=_FILE,
    ),
    Route(
        method="GET", path=_FILES + ":archive", handler=files.get_archive, name="getArchive",
        summary="A tree or file as a tar stream.", query=(_path, _user), response_media=TAR, errors=_FILE,
    ),
    Route(
        method="PUT", path=_FILES + ":archive", handler=files.put_archive, name="putArchive",
        summary="Unpack a tar stream under a directory.", query=(_path, _user),
        request_media=TAR, response=t.ArchiveReport, errors=_FILE,
    ),
    Route(
        method="GET", path="/v1/events", handler=other.events, name="listEvents",
        summary="Events in order; with `follow` a stream of lines that goes on.",
        query=(
            Query("since", "int", "After this sequence number."),
            Query("sandbox", "text", "Only about this sandbox."),
            Query("type", "text", "Only of this type."),
            _limit,
            Query("follow", "bool", "Stream (false)."),
        ),
        response=t.EventPage, errors=(e.InvalidRequest,),
    ),
    Route(
        method="GET", path="/v1/images", handler=other.images, name="listImages",
        summary="Environments by name.", response=t.ImageList,
    ),
    Route(method="GET", path="/v1/nodes", handler=other.nodes, name="listNodes", summary="Nodes.", response=t.NodeList),
    Route(
        method="GET", path="/metrics", handler=other.metrics, name="metrics",
        summary="Metrics in Prometheus' text format.", response_media="text/plain",
    ),
    Route(method="GET", path="/healthz", handler=other.healthz, name="health", summary="Whether it answers.", public=True),
)  # fmt: skip

_LATER_OF_A_SANDBOX = ("pause", "resume", "snapshot", "fork", "pack_diff", "network", "audit", "ports/{port}")
_LATER = ("fncall", "jobs", "jobs/{job}", "projects", "keys", "environments", "environments/{name}")

LATER: tuple[Route, ...] = tuple(
    Route(method=method, path=path, handler=other.later, name="later", summary="Part of a later release.")
    for path in [f"{_BOX}/{name}" for name in _LATER_OF_A_SANDBOX] + [f"/v1/{name}" for name in _LATER]
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
)
"""Paths that later releases bring: they answer Unsupported and are not in the OpenAPI document."""
