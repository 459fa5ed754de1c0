"""What this host can do: probes that try the real thing, with the reason and the remedy where it fails.

Standard library only, and importable without the rest of dsec: set-up runs it before anything is installed.
"""

from dsec.edge.host.check import Check, Feature
from dsec.edge.host.limits import PID_MAX_TARGET, LimitChange, raise_limits
from dsec.edge.host.probe import probe, unmet

__all__ = ["PID_MAX_TARGET", "Check", "Feature", "LimitChange", "probe", "raise_limits", "unmet"]
