"""What several ranks would write goes to the lowest of them."""

from milepost.dcp._engine.lent import lend
from milepost.planning.global_plan import dedup_save_plans
from milepost.planning.records import SavePlan

__all__ = ["dedup_tensors"]


def dedup_tensors(all_plans: list[SavePlan]) -> list[SavePlan]:
    """The same plans without what a lower rank writes too."""
    return dedup_save_plans(all_plans, save_to_lowest_rank=True)


lend(__name__, "init_logger logger")
