"""How much each caller may use: requests at once, requests and tokens a minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from inferencex.runtime.server.calls import Caller, CallerLimits
from inferencex.runtime.server.errors import TooManyRequests

Clock = Callable[[], float]

_SEAT_RETRY_AFTER = 1.0  # seconds; when a running request will end is not known


class TokenBucket:
    """Holds at most a minute's worth, and is refilled evenly.

    What costs more than the bucket holds is let through when it is full, and leaves it in debt: no request
    is impossible, and the rate over time holds all the same.
    """

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self._capacity = float(per_minute)
        self._per_second = per_minute / 60
        self._clock = clock
        self._level = self._capacity
        self._filled = clock()

    def wait_for(self, amount: float) -> float:
        """Return the seconds until `amount` may be taken; 0 when it may be now."""
        self._fill()
        missing = min(amount, self._capacity) - self._level
        return missing / self._per_second if missing > 1e-9 * self._capacity else 0.0

    def take(self, amount: float) -> None:
        """Take `amount`; negative ones give back."""
        self._fill()
        self._level = min(self._level - amount, self._capacity)

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._filled) * self._per_second)
        self._filled = now


@dataclass
class _Account:
    """What one caller uses."""

    limits: CallerLimits
    requests: TokenBucket | None
    tokens: TokenBucket | None
    running: int = 0


class Permit:
    """One request's part of a quota; give it back once it is over. Giving it back again does nothing."""

    def __init__(self, quotas: Quotas, caller: Caller, account: _Account, num_tokens: int) -> None:
        self._quotas = quotas
        self._caller = caller
        self._account = account
        self._reserved = num_tokens
        self._is_over = False

    def reserve(self, num_tokens: int) -> None:
        """Reserve that many tokens more, or raise TooManyRequests: then nothing changes."""
        with self._quotas.lock:
            self._quotas.take_tokens(self._caller, self._account, num_tokens)
            self._reserved += num_tokens

    def release(self, num_tokens: int | None = None) -> None:
        """End the request, which took `num_tokens` of prompt and output; None: as many as were reserved."""
        self._give_back(self._reserved if num_tokens is None else num_tokens, 0)

    def withdraw(self) -> None:
        """End the request as if it had never been: it was refused for another reason."""
        self._give_back(0, 1)

    def _give_back(self, used: int, num_requests: int) -> None:
        account = self._account
        with self._quotas.lock:
            if self._is_over:
                return
            self._is_over = True
            account.running -= 1
            if account.requests is not None:
                account.requests.take(-num_requests)
            if account.tokens is not None:
                account.tokens.take(used - self._reserved)


class Quotas:
    """Keeps count for every caller by name. Calls may come from any thread, and never wait.

    defaults: limits of callers that have none of their own, field by field
    clock:    seconds that only go up
    """

    def __init__(self, defaults: CallerLimits = CallerLimits(), clock: Clock = time.monotonic) -> None:
        self._defaults = defaults
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self.lock = threading.Lock()

    def acquire(self, caller: Caller, num_tokens: int = 0) -> Permit:
        """Let a request in that may take `num_tokens` of prompt and output, or raise TooManyRequests.

        What is not known yet can be reserved later. The tokens are corrected when the permit is released. After a
        raise nothing is held or used; `retry_after` says when the same request would be let in if nothing else was
        asked meanwhile.
        """
        with self.lock:
            account = self._account(caller)
            limits = account.limits
            if limits.concurrent is not None and account.running >= limits.concurrent:
                raise TooManyRequests(
                    f"{caller.name} has {account.running} requests in progress, and may have {limits.concurrent}",
                    retry_after=_SEAT_RETRY_AFTER,
                )
            if account.requests is not None and (wait := account.requests.wait_for(1)) > 0:
                raise TooManyRequests(
                    f"{caller.name} may send {limits.requests_per_minute} requests a minute; "
                    f"the next one is let in in {wait:.1f} s",
                    retry_after=wait,
                )
            self.take_tokens(caller, account, num_tokens)
            account.running += 1
            if account.requests is not None:
                account.requests.take(1)
        return Permit(self, caller, account, num_tokens)

    def take_tokens(self, caller: Caller, account: _Account, num_tokens: int) -> None:
        """Take tokens of a minute's worth, or raise TooManyRequests; called with the lock held."""
        if account.tokens is None:
            return
        wait = account.tokens.wait_for(num_tokens)
        if wait > 0:
            raise TooManyRequests(
                f"{caller.name} may use {account.limits.tokens_per_minute} tokens a minute, and this request may take "
                f"{num_tokens} with its prompt and max_tokens; it would be let in in {wait:.1f} s",
                retry_after=wait,
            )
        account.tokens.take(num_tokens)

    def running(self, caller: Caller) -> int:
        """Return how many requests of a caller are in progress."""
        with self.lock:
            account = self._accounts.get(caller.name)
            return 0 if account is None else account.running

    def _account(self, caller: Caller) -> _Account:
        account = self._accounts.get(caller.name)
        if account is None:
            own, default = caller.limits, self._defaults
            limits = CallerLimits(
                _either(own.concurrent, default.concurrent),
                _either(own.requests_per_minute, default.requests_per_minute),
                _either(own.tokens_per_minute, default.tokens_per_minute),
            )
            account = _Account(limits, self._bucket(limits.requests_per_minute), self._bucket(limits.tokens_per_minute))
            self._accounts[caller.name] = account
        return account

    def _bucket(self, per_minute: int | None) -> TokenBucket | None:
        return None if per_minute is None else TokenBucket(per_minute, self._clock)


def _either(own: int | None, default: int | None) -> int | None:
    return default if own is None else own
