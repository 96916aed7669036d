"""What the processes of a job tell each other about a checkpoint or snapshot: whether each has done its part.

By JAX's coordination service, not by a collective: it is written on a thread of its own, beside the programs of the
user's. Each process tells something under a key of its own and reads what the others
told; so it hears of a failure elsewhere by name, and none waits for one that has failed.

Thread contract: any thread, but one conversation (``Peers``) is one thread's.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import jax
from jax._src import distributed

from jax_mlp_offload import errors

TIMEOUT_S = 3600.0  # how long another process may write; one that dies ends the job sooner


_topics: Counter[str] = Counter()


def topic_of(kind: str, path: Any) -> str:
    """A topic about something at a path, that all processes come to, also where one of them failed over another path."""
    names = [part.partition(".orbax-checkpoint-tmp")[0] for part in str(getattr(path, "path", path)).split("/")]
    about = f"{kind}/{'/'.join(names)}"
    _topics[about] += 1
    return f"{about}/{_topics[about]}"


class Peers:
    """One conversation.

    Args:
      topic: the same in all processes that take part, and never used before.
      together: whether other processes take part at all.

    Raises:
      errors.OffloadError: if they should, but the coordination service is not there.
    """

    def __init__(self, topic: str, together: bool) -> None:
        self.index = jax.process_index()
        self.count = jax.process_count() if together else 1
        self.first = self.count == 1 or self.index == 0  # whether this process does what one does for all
        self._topic = f"jax_mlp_offload/{topic}"
        self._said = 0
        self._client: Any = distributed.global_state.client if self.count > 1 else None
        if self.count > 1 and self._client is None:
            raise errors.OffloadError(
                f"{self.count} processes have a part in the state, but JAX's coordination service does not run; call "
                "jax.distributed.initialize() before anything else"
            )

    @property
    def indices(self) -> range:
        """The processes that take part."""
        return range(self.count) if self.count > 1 else range(self.index, self.index + 1)

    def tell(self, value: Any, error: BaseException | None = None) -> list[Any]:
        """Tells the others a value, or what went wrong here; returns what all told, by process.

        Args:
          value: anything that JSON has.
          error: what went wrong here.

        Raises:
          BaseException: ``error``, once the others know.
          errors.OffloadError: if something went wrong in another process.
        """
        told = [json.dumps({"value": value, "error": None if error is None else f"{type(error).__name__}: {error}"})]
        if self._client is not None:
            try:
                told = self._exchange(told[0])
            except errors.DeadlineError as late:
                raise error or late from late
        if error is not None:
            raise error
        read = [json.loads(text) for text in told]
        for process, each in zip(self.indices, read, strict=True):
            if each["error"] is not None:
                raise errors.OffloadError(f"process {process} could not do its part: {each['error']}")
        return [each["value"] for each in read]

    def fail(self, error: BaseException) -> None:
        """Tells the others what went wrong here, and waits for nobody; the conversation is over."""
        if self._client is not None:
            text = json.dumps({"value": None, "error": f"{type(error).__name__}: {error}"})
            self._client.key_value_set(f"{self._topic}/{self._said + 1}/{self.index}", text, allow_overwrite=True)

    def _exchange(self, mine: str) -> list[str]:
        self._said += 1
        topic = f"{self._topic}/{self._said}"
        self._client.key_value_set(f"{topic}/{self.index}", mine)
        told = []
        for process in self.indices:
            try:
                told.append(self._client.blocking_key_value_get(f"{topic}/{process}", int(TIMEOUT_S * 1000)))
            except jax.errors.JaxRuntimeError as error:
                raise errors.DeadlineError(f"process {process} did not say how its part ended: {error}") from error
        if self._said > 1:  # everyone has answered since, so everyone has read it
            self._client.key_value_delete(f"{self._topic}/{self._said - 1}/{self.index}")
        return told
