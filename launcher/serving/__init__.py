"""One rank of the service: ``rank`` watches the process, ``worker`` loops, ``executor`` steps."""
