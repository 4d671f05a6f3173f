"""Training runs to read, run and change; each is one command (docs/rl.md)."""
