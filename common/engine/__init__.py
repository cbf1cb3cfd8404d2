"""An engine rank's process: main, loop, control, unified and embedding schedulers, KV events, watchdog."""
