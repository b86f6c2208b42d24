"""Standard benchmarks through lm-eval, on transferred prefixes. lm-eval itself is an extra."""
