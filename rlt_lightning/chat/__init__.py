"""`rlt chat`: ask a trained student in the terminal."""

from rlt_lightning.chat.conversation import chat

__all__ = ["chat"]
