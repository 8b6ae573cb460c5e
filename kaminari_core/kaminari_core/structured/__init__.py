"""Structured output: replies that are held, token by token, to a JSON schema, a regular expression or a list of choices.

    Structure (in the request) -> Grammars (worker thread, compiled and cached) -> Constraint (one row's state)
        -> Masks (engine thread, one copy to the device per step) -> the sampler, which never draws what is forbidden

The grammars themselves are llguidance's, an optional library that is imported when the first request asks for one.
"""
