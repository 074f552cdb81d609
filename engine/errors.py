"""The ways a command ends, and the exit code of each. Anything else is a bug and shows its traceback."""

DONE = 0
BUG = 1
WRONG_INPUT = 2
FAILED = 3
STOPPED = 75


class UserError(ValueError):
    """The user's input is wrong: one line on standard error with the way out, exit 2."""

    exit_code = WRONG_INPUT


class TrainingError(RuntimeError):
    """The training failed for a reason that has a name (NaN, damaged data, a difference found): exit 3."""

    exit_code = FAILED


class StopRequested(Exception):
    """A signal asked for a stop, and a checkpoint was saved: exit 75."""

    exit_code = STOPPED
