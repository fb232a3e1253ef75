"""Whether the ranks of a job can train together, before their first collective, which might hang.

Every rank collects facts about itself, and all ranks get the same report. A *problem* makes
training fail or hang; *advice* is about what makes it slower or may surprise.
"""

from poplar.doctor.examination import Report, examine
from poplar.doctor.facts import RankFacts
from poplar.doctor.finding import Finding

__all__ = ["Finding", "RankFacts", "Report", "examine"]
