"""What several ranks would write goes to one of them."""

from milepost.dcp._engine.lent import lend
from milepost.planning.global_plan import dedup_save_plans

__all__ = ["dedup_save_plans"]

lend(__name__)
