"""What a transferred prefix is worth: conditions, metrics, intervals, reports."""
