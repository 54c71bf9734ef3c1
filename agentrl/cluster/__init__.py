"""Start, place and supervise the processes of a run, on this machine or on the nodes of a cluster."""
