"""The data buffer: prompts in, leased groups out, completed groups in, batches out.

    from slime.buffer.service import serve
    from slime.buffer.settings import BufferSettings

What it never does: tokenise, generate, score or plan. Read `buffer.py` first, then `leases.py` and `batches.py`.
"""
