"""The buckets of a server's histograms, as its flags choose them."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.server.observe import ObserveArgs, token_buckets

_TTFT = (.005, .01, .025, .05, .1, .2, .4, .8, 1.5, 3, 6, 12, 25, 50, 100, 200)
_ITL = (.001, .002, .004, .006, .008, .01, .015, .02, .03, .04, .06, .08, .1, .2, .4, .8, 1.5, 3)
_E2E = (.01, .05, .1, .25, .5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480, 960, 1920)
_PROMPT = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
_GENERATION = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Buckets:
    """Upper bounds, in seconds and in tokens; without bounds the tokens of requests have no histogram."""

    ttft: tuple[float, ...] = _TTFT
    itl: tuple[float, ...] = _ITL
    e2e: tuple[float, ...] = _E2E
    prompt_tokens: tuple[float, ...] = ()
    generation_tokens: tuple[float, ...] = ()

    @classmethod
    def of_flags(cls, args: ObserveArgs) -> Buckets:
        """Returns the buckets that a server's flags name. Raises ConfigError."""
        tokens = (token_buckets("--prompt-tokens-buckets", args.prompt_tokens_buckets) or _PROMPT,
                  token_buckets("--generation-tokens-buckets", args.generation_tokens_buckets) or _GENERATION)
        return cls(_sorted(args.bucket_time_to_first_token) or _TTFT, _sorted(args.bucket_inter_token_latency) or _ITL,
                   _sorted(args.bucket_e2e_request_latency) or _E2E, *(tokens if args.collect_tokens_histogram else ()))


def _sorted(bounds: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(sorted(set(bounds)))
