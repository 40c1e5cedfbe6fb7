"""The command line as its users meet it: words on two streams, one exit code, never a traceback."""
