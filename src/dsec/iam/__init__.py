"""Principals, API keys and the one gate at ingress."""

from dsec.iam.authorize import Action, Authenticator, Principal, Resource, authorize, checked_project
from dsec.iam.bootstrap import DEFAULT_PRINCIPAL, DEFAULT_PROJECT, open_iam
from dsec.iam.keys import hash_key, new_key, read_key_file, write_key_file

__all__ = [
    "DEFAULT_PRINCIPAL",
    "DEFAULT_PROJECT",
    "Action",
    "Authenticator",
    "Principal",
    "Resource",
    "authorize",
    "checked_project",
    "hash_key",
    "new_key",
    "open_iam",
    "read_key_file",
    "write_key_file",
]
