"""Will these ranks work together? Answered before their first collective, which may hang instead.

Every rank says what it is (`facts`), and all of them get the same report. A *problem* is what
training fails or hangs on, *advice* what makes it slower or may surprise.
"""

from poplar.doctor.examination import examine
from poplar.doctor.facts import RankFacts
from poplar.doctor.finding import Finding
from poplar.doctor.report import Report

__all__ = ["Finding", "RankFacts", "Report", "examine"]
