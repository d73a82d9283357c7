"""What every trainer calls and no algorithm changes: skip it to learn what an algorithm does.

- quiet: silences notices of the libraries, never their errors
- processes: the processes of a run, their devices, and what they tell each other
- settings: where settings come from, and whether they are in range
- checks: mistakes that can be found before anything large is loaded
- hub: whether the Hugging Face hub can be reached
- memory: how much a run will need, how much it used, and how freed memory is used again
- header: what a run prints before it starts
- records: the folder of a run and the files in it
- terminal: the lines that a run prints while it goes on
- before_after: one test problem with its responses before and after training
- files: replacing a file so that a kill can't spoil it, and the lock on a run's folder
- faults: one message if a run can't write its files
- checkpoints: writing a checkpoint that survives a kill, and resuming from it
- weights: a sample of the weights, to see how many of them a step changes
- clock: seconds by phase
- signals: Ctrl-C and SIGTERM
"""
