"""Traffic: several clients at once, each asking as soon as it was answered, against an engine or any OpenAI-compatible server.

`clients` has the two kinds of client, `drive` lets them ask and says what they saw.
"""
