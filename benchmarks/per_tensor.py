"""The clusters of HAP (EuroSys 2024) and HeteroG (CoNEXT 2020), simulated.

Both systems decide per tensor or operator how it is computed and communicated. Here our
reconstructions of their policies, two kinds of data parallelism and Poplar's planner decide for the
same models on the same clusters. Nothing is measured: every line says "simulated".

    python benchmarks/per_tensor.py --output rows.jsonl
    python benchmarks/per_tensor.py --cluster hap-1 --model vgg19
    python benchmarks/per_tensor.py --quick
    python benchmarks/per_tensor.py --show benchmarks/results/per_tensor.jsonl --markdown

Policies:

- `DP-EV`: data parallelism with even batches;
- `DP-CP`: data parallelism with batches in proportion to FLOP/s;
- `DP-EV, servers`: even batches, and a parameter server for each gradient instead of all-reduce;
- `HAP`: *our reconstruction* (`published_clusters/hap.py`), without the authors' code;
- `HeteroG`: *our reconstruction* (`published_clusters/heterog.py`), without the authors' code;
- `Poplar`: the plan of `poplar.planner.search`;
- `Poplar, programme`: the fastest of that plan and of the programmes of `poplar.programmes.search`.

All policies use the same costs (`published_clusters/costs.py`) and simulator
(`published_clusters/simulation.py`). `published_clusters/published.py` has the published figures
and settings with their sources. `hap-8` is the whole cluster of HAP, `hap-1` one GPU of each host.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from published_clusters.published import EVALUATIONS
from published_clusters.row import rows_of
from published_clusters.table import COLUMNS, findings, markdown
from rows import Row, new_console, new_parser, shown_rows, table_of, write_rows

MODELS = tuple(dict.fromkeys(model for one in EVALUATIONS.values() for model in one.models))
QUICK = ("hap-1", "heterog")
"""Clusters of `--quick`, each with its first model."""


def main() -> None:
    """Run all cases and print the tables and the findings."""
    parser = new_parser(__doc__, quick="two clusters with one model each")
    parser.add_argument(
        "--cluster", nargs="+", choices=EVALUATIONS, default=list(EVALUATIONS), help="clusters"
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS, help="models")
    parser.add_argument("--markdown", action="store_true", help="print one Markdown table")
    arguments = parser.parse_args()
    saved = shown_rows(arguments.show, "per_tensor") if arguments.show else None
    rows = [
        row
        for row in (_simulated(arguments) if saved is None else saved)
        if row["cluster"] in arguments.cluster and row["model"] in arguments.model
    ]
    if not rows:
        clusters, models = ", ".join(arguments.cluster), ", ".join(arguments.model)
        parser.error(f"no cluster of {clusters} has a model of {models}")
    if arguments.output:
        write_rows(arguments.output, rows)
    if arguments.markdown:
        print("\n".join(markdown(rows)))
        return
    console = new_console()
    for name in dict.fromkeys(row["cluster"] for row in rows):
        own = [row for row in rows if row["cluster"] == name]
        console.print(table_of(own, COLUMNS, f"simulated: {name}: {own[0]['hosts']}"))
    print("\n".join(findings(rows)))


def _simulated(arguments: argparse.Namespace) -> Iterator[Row]:
    for name in QUICK if arguments.quick else arguments.cluster:
        models = [model for model in EVALUATIONS[name].models if model in arguments.model]
        for model in models[:1] if arguments.quick else models:
            yield from rows_of(name, EVALUATIONS[name], model)


if __name__ == "__main__":
    main()
