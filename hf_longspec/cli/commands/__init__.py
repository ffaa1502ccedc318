"""The commands: a file each, with the options, their checks and the order of the work. Help imports no torch."""
