"""What a user did wrong or has to know, as opposed to a defect of forge: one sentence and an exit code, never a traceback."""

FINISHED = 0
FAILED = 1
BAD_CONFIG = 2
STOPPED = 75
WATCHDOG = 76
NO_CHECKPOINT = 77


class UserError(Exception):
    """Ends the program with `message` on rank 0 and `exit_code` on every rank.

    The message names what was given, what is allowed and what to do.
    """

    def __init__(self, message: str, exit_code: int = BAD_CONFIG):
        super().__init__(message)
        self.exit_code = exit_code
