"""What keeps a sandbox inside, apart from namespaces: the system-call filter."""

from dsec.security.seccomp import ProfileReport, compile_profile, find_profile

__all__ = ["ProfileReport", "compile_profile", "find_profile"]
