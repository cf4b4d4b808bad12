"""The processes: gateway, scheduler and worker, the `stepweave` command and the supervisor."""
