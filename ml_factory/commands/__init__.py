"""The verbs of the command line; nothing heavy is imported until a verb's work begins."""
