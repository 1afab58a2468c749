"""Protection of the HTTP servers of this package: the embedded engine, the router, and the agents' gateway.

access.py        host, origin, key and content type of a request
bodies.py        reads bodies within limits of size and time; JSON
connections.py   limits the number of connections, and the time in which each must send a head
workers.py       runs slow work off the event loop, within a deadline
"""

from slime.rollout.doors.access import Access, Refused, check_exposure
from slime.rollout.doors.bodies import Bodies, parse_json
from slime.rollout.doors.connections import Connections, listen
from slime.rollout.doors.workers import Workers

__all__ = ["Access", "Bodies", "Connections", "Refused", "Workers", "check_exposure", "listen", "parse_json"]
