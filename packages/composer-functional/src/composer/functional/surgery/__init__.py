"""Surgery: functions that change a model in place."""
