"""The sub-commands of `revela-hub`, one module each; `revela_hub.cli.main` imports the one that is asked for."""
