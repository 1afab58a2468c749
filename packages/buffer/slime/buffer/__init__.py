"""The data buffer: prompts in, leased groups out, completed groups in, steps out.

    from slime.buffer.service import serve
    from slime.buffer.settings import BufferSettings

It never tokenizes, generates, scores or plans. Read `buffer.py` first, then `groups/leases.py` and `groups/steps.py`.
"""
