"""The errors that Atoll raises on purpose. Each says what happened, where, and the mend.

The command line turns them into one line on stderr and an exit code; anything else that escapes is a defect of ours.
"""


class AtollError(Exception):
    """Something that Atoll can explain; never shown with a traceback."""

    exit_code = 1


class UserError(AtollError):
    """What was asked can't be done as asked: a wrong option, a missing file, a store without the table. Nothing was changed."""

    exit_code = 2


class Failure(AtollError):
    """The work was well asked and didn't succeed: a lost store, a corrupt object, a dead process. It can be run again."""


class ObjectMissing(Failure):
    """An object that should be in the store isn't there. The store was reached, so this isn't a network fault."""


class ObjectTaken(Failure):
    """Somebody else has created the object of this name first. Nothing was written."""


class StoreUnreachable(Failure):
    """The store didn't answer, or refused us. Whether a write under way took effect is unknown."""


class SequenceTaken(Failure):
    """Another writer has already committed under this writer name and sequence number. Nothing was written."""
