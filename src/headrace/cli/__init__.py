"""The command line: one file per command, ``collect()`` for the result, ``render`` for the text."""
