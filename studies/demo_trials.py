"""The trials behind the settings of `uefl demo`, as arguments of `uefl run` (`python -m studies.demo trials`)."""

from __future__ import annotations

from uefl.experiment.demo_comparisons import NUM_FOLDS

TRIAL_SEEDS = (30, 31)
FOLDS = [f"fold={i}/{NUM_FOLDS}" for i in range(1, NUM_FOLDS + 1)]

_FASTER = "evaluate_every=1000 evaluate_local=false"
_HEART = f"heart validation_fraction=0.2 {_FASTER}"
_EARLIER = "codeword_gradient=code gate=none gate_value=0.75"  # the codebook before these trials
_RIDGE = "encoder=identity hidden_size=0 dropout=0 feature_norm=none local.lr=0.03 logit_adjustment=local"
_LINEAR = "encoder=identity hidden_size=0 feature_norm=none optimizer=adam local.lr=0.03 logit_adjustment=local"
_FIXED_GATE = "num_codewords=16 segments=1 gate=fixed gate_value=0.1 fine_tuning_epochs=5"
_DROPOUT = "dropout=0.5 weight_decay=0.1 logit_adjustment=local"
_DIGITS = f"mnist5k num_silos=3,1,1 test_per_silo=400 validation_fraction=0.25 iterations=2 {_FASTER}"
_IMAGES_600, _SHORT = "train_per_silo=600", "image_size=14 rounds=10 extra_rounds=8 epochs=1"
_CHOSEN_DIGITS = f"{_DIGITS} {_IMAGES_600} image_size=14 rounds=7 extra_rounds=5 epochs=1 schedule=cosine"
_BY_RULE = "num_codewords=0 segments=0"
_TASK = f"{_BY_RULE} codeword_gradient=task commitment_weight=0.05"
_GATE = f"{_TASK} gate=learned gate_value=0.5"
_LOW_GATE = f"{_TASK} gate=learned gate_value=0.25"
_CODEBOOKS = {
    "four segments, no gate": f"num_codewords=256 segments=4 commitment_weight=0.01 {_EARLIER}",
    "size by rule, no gate": f"{_BY_RULE} commitment_weight=0.01 {_EARLIER}",
    "size by rule, no gate, task gradient": f"{_TASK} gate=none gate_value=0.75",
    "gate from .5": _GATE,
    "gate from .9": f"{_TASK} gate=learned gate_value=0.9",
    "gate from .5, no layer norm": f"{_GATE} feature_norm=none",
    "gate from .5, own batch norm": f"{_GATE} batch_norm=personal",
    "gate from .5, 5 epochs": f"{_GATE} fine_tuning_epochs=5",
    "gate from .5, own batch norm, 5 epochs": f"{_GATE} batch_norm=personal fine_tuning_epochs=5",
    "gate from .25, 5 epochs": f"{_LOW_GATE} fine_tuning_epochs=5",
    "gate from .25, own batch norm, 5 epochs": f"{_LOW_GATE} batch_norm=personal fine_tuning_epochs=5",
    "gate from .25": _LOW_GATE,
    "gate from .1": f"{_TASK} gate=learned gate_value=0.1",
    "gate from .1, 5 epochs": f"{_TASK} gate=learned gate_value=0.1 fine_tuning_epochs=5",
    "fixed gate .1, 5 epochs": f"{_TASK} gate=fixed gate_value=0.1 fine_tuning_epochs=5",
    "fixed gate .25, 5 epochs": f"{_TASK} gate=fixed gate_value=0.25 fine_tuning_epochs=5",
    "gate from .25, own batch norm, 10 epochs": f"{_LOW_GATE} batch_norm=personal fine_tuning_epochs=10",
    "gate from .5, codewords for all": f"{_GATE} extend=all",
    "gate from .5, no own codewords": f"{_GATE} extend=none",
}


_DROPOUT_AND_L2 = [(p, w) for p in (0.1, 0.2, 0.3) for w in (0.01, 0.03, 0.1)]
_FORMS = {"": "", ", no layer norm": "feature_norm=none"}
_RATES = {"": "", ", restarted rate": "restart_rounds=4"}  # as in the group rounds of UEFL
_CHANGES = {
    "": "",
    ", decay .0001": "weight_decay=0.0001",
    ", decay .001": "weight_decay=0.001",
    ", decay .01": "weight_decay=0.01",
    ", dropout 0": "dropout=0",
    ", dropout .3": "dropout=0.3",
    ", dropout .5": "dropout=0.5",
}
_GROUP_RULES = {"in groups by halves": "halves", "in groups": "spacing"}


def _tune(epochs: int, settings: str) -> str:
    """Return FedAvg with local fine-tuning on the digits."""
    return f"fine-tuning {_CHOSEN_DIGITS} {settings} fine_tuning_epochs={epochs}"


def replace_rounds(arguments: str, alike_rule: str) -> str:
    """Return arguments with rounds in groups of alike silos in place of the last third of the rounds."""
    if "heart" in arguments:
        return f"{arguments} group_rounds=5 alike_rule={alike_rule}"
    groups = f"rounds=5 extra_rounds=7 group_rounds=4 alike_rule={alike_rule}"
    return arguments.replace("rounds=7 extra_rounds=5", groups)


TRIALS = {
    "hospitals": {
        **{
            f"logistic regression alone, ridge {r}": f"local-only {_HEART} {_RIDGE} weight_decay={r}"
            for r in (1, 3, 10)
        },
        "FedAvg, dropout .1, no logit adjustment": f"fedavg {_HEART} dropout=0.1 logit_adjustment=none",
        "FedAvg, dropout .5": f"fedavg {_HEART} {_DROPOUT}",
        "FedAvg, dropout .5, no layer norm": f"fedavg {_HEART} {_DROPOUT} feature_norm=none",
        "UEFL, dropout .5, no gate": f"uefl {_HEART} {_DROPOUT} num_codewords=16 segments=4 {_EARLIER}",
        **{
            f"UEFL, dropout .5, gate from {value:g}, fine-tuned": (
                f"uefl {_HEART} {_DROPOUT} gate_value={value} fine_tuning_epochs=5"
            )
            for value in (0.25, 0.5, 0.75)
        },
        **{
            f"UEFL, dropout .5, gate from {value:g}": f"uefl {_HEART} {_DROPOUT} gate_value={value}"
            for value in (0.1, 0.25, 0.5)
        },
        "FedAvg, dropout .5, fine-tuned": f"fine-tuning {_HEART} {_DROPOUT} fine_tuning_epochs=5",
        **{
            f"logistic regression alone, L2 {w:g}": f"local-only {_HEART} {_LINEAR} dropout=0 weight_decay={w}"
            for w in (0.01, 0.03, 0.1)
        },
        **{
            f"{label}, L2 {w:g}": f"{settings.replace(' ', f' {_HEART} {_LINEAR} ', 1)} weight_decay={w}"
            for label, settings in {
                "FedAvg of logistic regression": "fedavg dropout=0",
                "FedAvg of logistic regression, fine-tuned": "fine-tuning dropout=0 fine_tuning_epochs=5",
                "FedAvg of logistic regression, dropout .1, fine-tuned": "fine-tuning dropout=0.1 fine_tuning_epochs=5",
                "UEFL, linear, fixed gate .1, no dropout, fine-tuned": f"uefl dropout=0 {_FIXED_GATE}",
                "UEFL, linear, fixed gate .1, dropout .1, fine-tuned": f"uefl dropout=0.1 {_FIXED_GATE}",
                "UEFL, linear, fixed gate .1, dropout .1, in groups, fine-tuned": (
                    f"uefl dropout=0.1 {_FIXED_GATE} group_rounds=5 alike_rule=spacing"
                ),
            }.items()
            for w in (0.003, 0.01, 0.03)
        },
    },
    # At least as many trials of every other method as UEFL has above.
    "hospitals, equal trials": {
        **{
            f"{label}, dropout {p:g}, L2 {w:g}": f"{settings} {_HEART} {_LINEAR} dropout={p} weight_decay={w}"
            for label, settings in {
                "logistic regression alone": "local-only",
                "FedAvg of logistic regression": "fedavg",
            }.items()
            for p, w in (*_DROPOUT_AND_L2, (0, 0.3))
        },
        **{
            f"FedAvg of logistic regression, dropout {p:g}, fine-tuned, {e} epochs, L2 {w:g}": (
                f"fine-tuning fine_tuning_epochs={e} {_HEART} {_LINEAR} dropout={p} weight_decay={w}"
            )
            for p, e in ((0.3, 5), (0.1, 2), (0.1, 10))
            for w in (0.003, 0.01, 0.03)
        },
        **{
            f"local-only, dropout {p:g}, decay {w:g}": (
                f"local-only {_HEART} logit_adjustment=local dropout={p} weight_decay={w}"
            )
            for p in (0.5, 0.7, 0.8, 0.9)
            for w in (0.03, 0.1, 0.3, 1)
        },
        # The best of these penalties and decays were the smallest, and then the best dropout the largest.
        **{
            f"FedAvg of logistic regression, dropout {p:g}, L2 {w:g}": (
                f"fedavg {_HEART} {_LINEAR} dropout={p} weight_decay={w}"
            )
            for p in (0.1, 0.2, 0.3, 0.4)
            for w in (0, 0.001, 0.003)
        },
        "FedAvg of logistic regression, dropout 0.1, fine-tuned, 5 epochs, L2 0.001": (
            f"fine-tuning fine_tuning_epochs=5 {_HEART} {_LINEAR} dropout=0.1 weight_decay=0.001"
        ),
        **{
            f"local-only, dropout 0.7, decay {w:g}": (
                f"local-only {_HEART} logit_adjustment=local dropout=0.7 weight_decay={w}"
            )
            for w in (0, 0.01)
        },
        # Around the best of these, until every row has as many as UEFL, networks and linear models together.
        **{
            f"logistic regression alone, dropout {p:g}, L2 {w:g}": (
                f"local-only {_HEART} {_LINEAR} dropout={p} weight_decay={w}"
            )
            for p, w in (
                *((p, w) for p in (0, 0.1, 0.2, 0.3, 0.4) for w in (0.02, 0.05)),
                *((p, 0.003) for p in (0.1, 0.2, 0.3)),
                *((0.4, w) for w in (0.003, 0.01, 0.03, 0.1)),
            )
        },
        **{
            f"FedAvg of logistic regression, dropout {p:g}, L2 {w:g}": (
                f"fedavg {_HEART} {_LINEAR} dropout={p} weight_decay={w}"
            )
            for p, w in ((0.25, 0), (0.25, 0.001), (0.35, 0), (0.35, 0.001), (0.2, 0.0003), (0.3, 0.0003))
        },
        **{
            f"FedAvg of logistic regression, dropout {p:g}, fine-tuned, {e} epochs, L2 {w:g}": (
                f"fine-tuning fine_tuning_epochs={e} {_HEART} {_LINEAR} dropout={p} weight_decay={w}"
            )
            for p, e, w in (
                *((0.2, e, w) for e in (2, 5, 10) for w in (0.003, 0.01, 0.03)),
                *((0.3, e, w) for e in (2, 10) for w in (0.003, 0.01)),
                *((0.1, 20, w) for w in (0.003, 0.01)),
            )
        },
        **{
            f"local-only, dropout {p:g}, decay {w:g}": (
                f"local-only {_HEART} logit_adjustment=local dropout={p} weight_decay={w}"
            )
            for p in (0.6, 0.65, 0.75)
            for w in (0.03, 0.1, 0.3)
        },
        **{
            f"local-only, width {width}, dropout 0.7, decay {w:g}": (
                f"local-only {_HEART} logit_adjustment=local width={width} dropout=0.7 weight_decay={w}"
            )
            for width in (32, 128)
            for w in (0.03, 0.1, 0.3)
        },
    },
    "digits": {
        f"FedAvg, {label}": f"fedavg {_DIGITS} {settings}"
        for label, settings in {
            "600 images, 6 rounds of 3 epochs": f"{_IMAGES_600} image_size=14 rounds=4 extra_rounds=2 epochs=3",
            "600 images, 9 rounds of 2 epochs": f"{_IMAGES_600} image_size=14 rounds=5 extra_rounds=4 epochs=2",
            "600 images, 18 rounds of 1 epoch": f"{_IMAGES_600} {_SHORT}",
            "600 images, 9 rounds of 2 epochs, cosine": (
                f"{_IMAGES_600} image_size=14 rounds=5 extra_rounds=4 epochs=2 schedule=cosine"
            ),
            "600 images, 18 rounds of 1 epoch, cosine": f"{_IMAGES_600} {_SHORT} schedule=cosine",
            "600 images of 28 pixels, width 8, 6 rounds of 2 epochs": (
                f"{_IMAGES_600} width=8 rounds=4 extra_rounds=2 epochs=2"
            ),
        }.items()
    },
    "digits, less time": {
        "FedAvg, 400 images, 18 rounds of 1 epoch, cosine": (
            f"fedavg {_DIGITS} train_per_silo=400 {_SHORT} schedule=cosine"
        ),
        "FedAvg, 600 images, 12 rounds of 1 epoch, cosine": (
            f"fedavg {_DIGITS} {_IMAGES_600} image_size=14 rounds=7 extra_rounds=5 epochs=1 schedule=cosine"
        ),
    },
    "digits, codebook": {
        **{f"UEFL, {label}": f"uefl {_CHOSEN_DIGITS} {settings}" for label, settings in _CODEBOOKS.items()},
        **{
            f"UEFL, gate from {gate:g}, {label}, {e} epochs": (
                f"uefl {replace_rounds(_CHOSEN_DIGITS, rule)} {_TASK} gate=learned gate_value={gate} "
                f"fine_tuning_epochs={e}"
            )
            for label, rule in _GROUP_RULES.items()
            for gate in (0.1, 0.25)
            for e in (5, 10)
        },
        "FedAvg, fine-tuned": f"fine-tuning {_CHOSEN_DIGITS} fine_tuning_epochs=5",
        "FedAvg, fine-tuned, 10 epochs": f"fine-tuning {_CHOSEN_DIGITS} fine_tuning_epochs=10",
        "FedAvg, no layer norm": f"fedavg {_CHOSEN_DIGITS} feature_norm=none",
        "FedBN": f"fedbn {_CHOSEN_DIGITS}",
        "FedBN, fine-tuned": f"fine-tuning {_CHOSEN_DIGITS} batch_norm=personal fine_tuning_epochs=5",
    },
    # At least as many trials of FedAvg, also fine-tuned, as UEFL has above; also with its learning rates.
    "digits, equal trials": {
        **{
            f"FedAvg{form}{rates}{change}": f"fedavg {_CHOSEN_DIGITS} {_FORMS[form]} {_RATES[rates]} {_CHANGES[change]}"
            for form in _FORMS
            for rates in _RATES
            for change in _CHANGES
        },
        **{
            f"FedAvg, fine-tuned, {e} epochs{form}{rates}": _tune(e, f"{_FORMS[form]} {_RATES[rates]}")
            for form in _FORMS
            for rates in _RATES
            for e in (2, 5, 10, 20)
        },
        **{f"FedAvg, fine-tuned, 40 epochs{form}": _tune(40, _FORMS[form]) for form in _FORMS},
        **{
            f"FedAvg, fine-tuned, 20 epochs, no layer norm{change}": _tune(20, f"feature_norm=none {_CHANGES[change]}")
            for change in (", decay .001", ", decay .01")
        },
        **{
            f"FedAvg, fine-tuned, {e} epochs{form}{change}": _tune(e, f"{_FORMS[form]} {_CHANGES[change]}")
            for form in _FORMS
            for change in (", decay .001", ", decay .01", ", dropout .3")
            for e in (5, 10)
        },
        # As in the hospitals: as many as UEFL has in all.
        **{
            f"FedAvg{form}{change}": f"fedavg {_CHOSEN_DIGITS} {_FORMS[form]} {settings}"
            for form in _FORMS
            for change, settings in {
                ", dropout .05": "dropout=0.05",
                ", decay .03": "weight_decay=0.03",
                ", decay .1": "weight_decay=0.1",
            }.items()
        },
        **{f"FedAvg, fine-tuned, {e} epochs, no layer norm": _tune(e, "feature_norm=none") for e in (15, 30)},
        **{
            f"FedAvg, fine-tuned, {e} epochs, no layer norm, dropout 0": _tune(e, "feature_norm=none dropout=0")
            for e in (5, 10, 15, 20, 30)
        },
        "FedAvg, fine-tuned, 10 epochs, dropout 0": _tune(10, "dropout=0"),
        # The best of these have no layer norm, little dropout and many epochs, which UEFL had not tried.
        **{
            f"UEFL, gate from 0.1, in groups by halves, {e} epochs{label}": (
                f"uefl {replace_rounds(_CHOSEN_DIGITS, 'halves')} {_TASK} gate=learned gate_value=0.1 "
                f"fine_tuning_epochs={e} {settings}"
            )
            for label, settings, epochs in (
                (", no layer norm", "feature_norm=none", (5, 10, 20)),
                (", no layer norm, dropout .05", "feature_norm=none dropout=0.05", (5, 10, 15, 20, 30)),
                (", dropout .05", "dropout=0.05", (5, 10, 20)),
            )
            for e in epochs
        },
        **{
            f"FedAvg, fine-tuned, {e} epochs{label}": _tune(e, settings)
            for label, settings, epochs in (
                (", no layer norm, dropout .05", "feature_norm=none dropout=0.05", (10, 15, 20, 25, 30)),
                (", no layer norm, dropout 0", "feature_norm=none dropout=0", (25, 40)),
                (", dropout 0", "dropout=0", (15, 20, 30)),
            )
            for e in epochs
        },
        **{
            f"FedAvg{form}, dropout {p:g}, decay {w:g}": (
                f"fedavg {_CHOSEN_DIGITS} {_FORMS[form]} dropout={p} weight_decay={w}"
            )
            for form, p, decays in (
                (", no layer norm", 0, (0.0001, 0.001, 0.01, 0.03, 0.1)),
                (", no layer norm", 0.02, (0.0001, 0.001, 0.01)),
                (", no layer norm", 0.05, (0.0001, 0.001, 0.01, 0.03)),
                ("", 0.05, (0.0001, 0.001, 0.01)),
            )
            for w in decays
        },
        **{
            f"FedAvg, no layer norm{rates}, dropout .02": (
                f"fedavg {_CHOSEN_DIGITS} feature_norm=none {settings} dropout=0.02"
            )
            for rates, settings in _RATES.items()
        },
    },
    # The preset itself: epochs of fine-tuning, who gets codewords, own batch norm, groups.
    **{
        f"{data}, preset": {
            "FedAvg": f"fedavg {arguments}",
            **{f"FedAvg, epochs: {e}": f"fine-tuning {arguments} fine_tuning_epochs={e}" for e in (1, 2, 5)},
            **{f"UEFL, epochs: {e}": f"uefl {arguments} fine_tuning_epochs={e}" for e in (0, 1, 2, 3, 5)},
            **{
                f"UEFL, epochs: 5, extend={value}": f"uefl {arguments} fine_tuning_epochs=5 extend={value}"
                for value in ("none", "random", "all", "validated")
            },
            "UEFL, own batch norm": f"uefl {arguments} batch_norm=personal fine_tuning_epochs=0",
            "UEFL, own batch norm, epochs: 2": f"uefl {arguments} batch_norm=personal fine_tuning_epochs=2",
            **{
                f"UEFL, {label}, epochs: {e}": f"uefl {replace_rounds(arguments, rule)} fine_tuning_epochs={e}"
                for label, rule in _GROUP_RULES.items()
                for e in (0, 2, 5)
            },
        }
        for data, arguments in {
            "nine silos": _CHOSEN_DIGITS.replace("num_silos=3,1,1 test_per_silo=400", "").replace(_IMAGES_600, ""),
            "3, 1 and 1 silos": _CHOSEN_DIGITS,
            "hospitals": f"heart validation_fraction=0.2 {_FASTER}",
        }.items()
    },
}
