"""The error for input that is refused before anything is compiled."""


class Refused(Exception):  # noqa: N818 - what happened, not what went wrong in the program
    """The input cannot be run; the message says why. The command ends with status 2."""


class Failed(Exception):  # noqa: N818 - named for what is the matter
    """Something went wrong in the middle; the message is for the terminal, the exit status 1."""
