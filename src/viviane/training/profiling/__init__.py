"""Where the time of a step goes: stage times, recorded traces, and what they say about the device."""
