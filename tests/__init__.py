"""Facts about kvtransfer, room by room. Property tests draw the same examples on every run."""
