"""An engine in a process of its own, and what keeps it running.

    parent                                    child
    SupervisedEngine   the surface, restarts
      Ledger           who is where           Reporter     tells the parent, arms the watchdog
      ChildProcess     pipes and threads ===> child.main   commands in, an Engine inside

The parent keeps the queue, the requests in flight and their deadlines, and never touches the device; the child owns the device
and keeps nothing that is not lost with it. So whatever ends the child, each request is known here, and ends with a reply or with
an error that says what happened.
"""
