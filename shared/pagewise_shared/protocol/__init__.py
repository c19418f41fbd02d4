"""The wire protocol between gateways, the scheduler and executors: every public name of its modules."""

# ruff: noqa: F403
from pagewise_shared.protocol.base import *
from pagewise_shared.protocol.codec import *
from pagewise_shared.protocol.gateway_messages import *
from pagewise_shared.protocol.limits import *
from pagewise_shared.protocol.memory import *
from pagewise_shared.protocol.messages import *
from pagewise_shared.protocol.steps import *
from pagewise_shared.protocol.storage import *
from pagewise_shared.protocol.tiers import *
