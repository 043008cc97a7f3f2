"""`loraplex up`: the whole stack on one machine, as child processes of one supervisor."""
