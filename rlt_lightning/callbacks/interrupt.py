"""Ctrl-C in a fit: the first stops it after the iteration, with a checkpoint; the second ends it at once.

Ctrl-C ─▶ Interrupt sets asked = True; a second Ctrl-C then kills the process as usual
          the iteration ends on all ranks ─▶ Checkpoint saves it, and raises Interrupted on all of them
            `rlt fit` prints the command that resumes, and exits with status 130
            `Trainer.fit` raises KeyboardInterrupt
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """Raised on all ranks after the same iteration. A KeyboardInterrupt would let Lightning kill them."""


class Interrupt:
    """Notice Ctrl-C (SIGINT) while a fit trains.

    Attributes:
        asked: Whether it has come.
    """

    def __init__(self) -> None:
        self.asked = False
        self.said = ""
        self.previous: Any = None
        self.listening = False

    def listen(self, said: str) -> None:
        """Start to notice Ctrl-C, if this is the main thread: Python allows a handler only there.

        Args:
            said: The line that the first one prints; '' for none.
        """
        self.asked, self.said = False, said
        if threading.current_thread() is threading.main_thread():
            self.previous = signal.signal(signal.SIGINT, self._notice)
            self.listening = True

    def end(self) -> None:
        """Restore what Ctrl-C did before; safe to call twice."""
        if self.listening:
            signal.signal(signal.SIGINT, self.previous)
            self.listening = False

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        # The system's own handler ends even a process that is in the middle of a forward. In an interactive
        # session it would end the session.
        signal.signal(number, self.previous if hasattr(sys, "ps1") else signal.SIG_DFL)
        if self.said:
            # Not print(), which this may have interrupted.
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{self.said}\n".encode())
