"""The keys of one attempt of the job: who has them may speak with its nodes, nobody else can."""

from __future__ import annotations

import secrets

import msgspec
import zmq


class Keys(msgspec.Struct, frozen=True):
    """CURVE keys in Z85, made anew for each attempt and known to all its agents.

    Attributes:
        server_public, server_secret: key pair that proves whoever listens.
        client_public, client_secret: key pair that proves whoever connects.
    """

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def make(cls) -> Keys:
        """New keys, of the operating system's random numbers."""
        (server_public, server_secret), (client_public, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(server_public.decode(), server_secret.decode(), client_public.decode(), client_secret.decode())

    def __repr__(self) -> str:
        """Without the secrets: what is logged is read by others."""
        return f"Keys(server_public={self.server_public!r}, client_public={self.client_public!r})"


class Password(msgspec.Struct, frozen=True):
    """Keeps strangers out where nothing is encrypted. It goes over the network as it is: who listens there has it."""

    word: str

    @classmethod
    def make(cls) -> Password:
        """A new password."""
        return cls(secrets.token_hex(32))

    def __repr__(self) -> str:
        """Without the word: what is logged is read by others."""
        return "Password(...)"
