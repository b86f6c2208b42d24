"""Facts about kvtransfer, room by room. Property tests draw the same examples on every run."""

from hypothesis import HealthCheck, settings

# No deadline and no complaint about slow draws: the machines that run this are small and shared.
settings.register_profile(
    "kvtransfer",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvtransfer")
