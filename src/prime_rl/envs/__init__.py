"""Environment worker processes, installation of environments, and the `vf-*` commands."""
