"""Counters of this replica, as Prometheus text on the admin side. Counting is adding to a field, nothing more."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Metrics:
    """What happened since the start; ``in_flight`` is now."""

    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    engine_failures: int = 0
    undelivered: int = 0
    replayed: int = 0
    flawed: int = 0
    hosted_tools: int = 0
    in_flight: int = 0
    errors: Counter[str] = field(default_factory=Counter[str])
    spent: Counter[str] = field(default_factory=Counter[str])

    def text(self) -> str:
        """Prometheus text format 0.0.4."""
        counters = {
            "calls": ("Calls committed", self.calls),
            "prompt_tokens": ("Prompt tokens of committed calls", self.prompt_tokens),
            "sampled_tokens": ("Sampled tokens of committed calls", self.sampled_tokens),
            "engine_failures": ("Requests that an engine failed or did not answer", self.engine_failures),
            "undelivered": ("Replies that the agent did not wait for", self.undelivered),
            "replayed": ("Requests sent again that got the reply of the first", self.replayed),
            "flawed": ("Replies whose token data contradict each other", self.flawed),
            "hosted_tools": ("Tools and items of tools left out because only a vendor runs them", self.hosted_tools),
        }
        lines: list[str] = []
        for name, (text, value) in counters.items():
            full = f"evener_proxy_{name}_total"
            lines += [f"# HELP {full} {text}.", f"# TYPE {full} counter", f"{full} {value}"]
        lines += [
            "# HELP evener_proxy_in_flight Calls in flight.",
            "# TYPE evener_proxy_in_flight gauge",
            f"evener_proxy_in_flight {self.in_flight}",
            "# HELP evener_proxy_errors_total Errors told to agents.",
            "# TYPE evener_proxy_errors_total counter",
        ]
        lines += [f'evener_proxy_errors_total{{code="{code}"}} {count}' for code, count in sorted(self.errors.items())]
        lines += [
            "# HELP evener_proxy_last_replies_total Calls answered by the proxy because a budget was spent.",
            "# TYPE evener_proxy_last_replies_total counter",
        ]
        lines += [f'evener_proxy_last_replies_total{{budget="{name}"}} {count}' for name, count in sorted(self.spent.items())]
        return "\n".join(lines) + "\n"
