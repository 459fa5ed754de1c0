"""The control plane: an ingress-neutral service, and REST over it."""
