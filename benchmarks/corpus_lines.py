"""Line numbers of points in released engines, read from the wheels by hand and script before the recipes were written.

They check the recipes independently: nothing here goes through the resolver. One line a release; a column is a point's name,
or says which of its sites is meant; ``a/b`` are several lines that all hold a place of that point, ``-`` none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# ruff: noqa: E501
SGLANG_V1 = """
release spec draft draft.graph draft.steps draft.forward accept.tree verify kv.alloc verify.target accept FILE kv.move extend extend.graph extend.eager
0.4.6.post5 251 320 410 420 479 424 491 492 506 533 eagle_utils 487/492/520 647 - 668
0.4.9.post6 298 504 529 538 629 554 641 642 665 692 eagle_utils 542/553/592/595/603/634 822 877 891
0.5.0rc2 316 522 547 556 647 572 659 660 683 710 eagle_utils 542/553/592/595/603/634 840 895 909
0.5.1 352 558 583 592 683 608 695 696 719 746 eagle_utils 565/576/615/618/626/657 891 946 960
0.5.2 414 620 645 654 753 670 765 766 789 816 eagle_utils 565/576/615/618/626/657 987 1042 1056
0.5.3 432 653 678 687 786 703 802 803 825 855 eagle_info 397/408/447/450/458/491 1026 1082 1096
0.5.4 238 460 485 497 598 515 619 620 642 674 eagle_info 410/421/460/463/471/504 846 902 916
0.5.5 249 477 502 514 615 532 636 637 659 691 eagle_info 417/428/467/470/478/510 889 945 959
0.5.6 259 505 530 542 643 560 664 665 687 719 eagle_info 419/433/475/478/486/518 917 973 987
0.5.7 266 515 540 552 653 570 674 676 699 731 eagle_info 444/458/500/503/511/543 881 937 951
0.5.8 274 523 548 560 661 578 682 684 707 739 eagle_info 449/460/499/502/510/542 889 946 960
0.5.9 278 532 557 569 670 587 691 693 716 748 eagle_info 449/460/499/502/510/542 902 959 973
0.5.10 279 539 564 576 680 594 706 708 731 762 eagle_info 451/462/501/504/512/544 920 977 991
0.5.11 435 720 745 757 861 775 887 889 912 943 eagle_info 480/491/530/533/541/575 1101 1159 1176
0.5.12 445 758 788 800 908 818 935 938 960 991 eagle_info 490/501/540/543/551/588 1154 1221 1237
"""
SGLANG_V2 = """
release COMMON spec draft kv.meta draft.graph draft.steps draft.forward accept.tree verify kv.meta verify.target accept.sample kv.move extend extend.graph extend.eager FILE kv.schedule
0.5.4 w 546 240 242 253 261 355 278 572 590 614 629 - 435 - 462 eagle_info_v2 80
0.5.5 w 553 245 247 258 266 360 283 579 599 623 638 - 440 - 469 eagle_info_v2 82
0.5.6 w 599 264 266 277 288 389 312 634 650 684 719 - 473 510 514 eagle_info_v2 82
0.5.7 w 604 269 271 282 293 394 317 648 665 699 734 - 478 515 519 eagle_info_v2 82
0.5.8 w 639 301 303 314 325 426 349 689 706 740 775 - 510 550 554 eagle_info_v2 81
0.5.9 w 650 302 304 315 326 427 350 700 717 751 786 - 511 551 555 eagle_info_v2 82
0.5.10 w 690 320 322 333 344 448 368 741 758 792 826 - 547 587 591 eagle_info_v2 82
0.5.11 w 701 327 329 340 351 455 375 759 782 816 850 - 555 598 602 eagle_info_v2 89
0.5.12 w 744 339 341 352 363 466 387 971 994 1040 1074 - 567 610 614 eagle_info_v2 89
0.5.13 w 922 400 402 425 436 573 473 1171 1183 1236 1270 1303 699 757 761 eagle_info_v2 126
0.5.14 w 1070 469 471 495 507 649 543 1431 1442 1495 1529 1563 809 869 873 eagle_info_v2 30
0.5.15 w 1172 505 507 531 543 690 579 1538 1549 1602 1636 1682 885 956 960 eagle_utils 771
0.5.16 c 1122 500 502 533 545 666 368 456 492 554 588 633 869 941 945 eagle_utils 803
0.5.17 c 1103 485 487 518 530 651 373 461 498 563 588 633 854 926 930 eagle_utils 879
0.5.18 c 1108 497 499 530 542 655 373 461 497 562 587 632 859 931 935 eagle_utils 897
0.5.19 c 1163 510 512 543 555 671 373 461 497 562 587 632 907 979 983 eagle_utils 928
0.5.20 c 1263 596 598 629 641 757 373 461 502 567 592 643 1005 1077 1081 eagle_utils 1004
0.5.21 c 1313 613 615 646 665 787 374 462 504 569 595 646 1039 1111 1115 eagle_utils 1050
0.5.22 c 1350 614 616 649 668 800 454/467 565 607 672 698 793 1054 1151 1155 eagle_utils 1112
0.5.23 c 1416 660 662 695 714 847 436/449 547 589 654 680 775 1110 1207 1211 eagle_utils 857
"""
SGLANG_SHARED = """
release cycle FILE output target
0.4.6.post5 1536 mixin 185 183
0.4.9.post6 1893 mixin 194 215
0.5.0rc2 1708 mixin 194 219
0.5.1 1719 mixin 194 220
0.5.2 1798 mixin 196 229
0.5.3 2037 mixin 203 236
0.5.4 1883 mixin 251 340
0.5.5 1944 mixin 282 343
0.5.6 1952 mixin 314 354
0.5.7 2162 mixin 344 396
0.5.8 2244 mixin 359 429
0.5.9 2278 mixin 417 431
0.5.10 2636 mixin 374 444
0.5.11 2901 mixin 397 445
0.5.12 2996 mixin 468 447
0.5.13 2985 brp 590 447
0.5.14 3145 brp 636 482
0.5.15 3191 brp 629 489
0.5.16 3290 brp 651 529
0.5.17 3528 brp 802 558
0.5.18 3626 brp 805 574
0.5.19 4013 brp 878 593
0.5.20 4245 brp 920 593
0.5.21 4338 brp 921 598
0.5.22 4490 brp 942 603
0.5.23 4614 brp 952 622
"""
VLLM_MRV1 = """
release cycle kv.meta verify.forward verify.logits sample_tokens accept.sample draft extend.forward draft.forward
0.10.2.post2 2000 2006/2026 2064 2102 - 2118 2136 215 325
0.11.2 2630 2659/2706 2799 2834 2879 2920 2929 300 468
0.12.0 2826 2855/2901 2995 3030 3075 3116 3123 327 507
0.14.0 3109 3138/3180 3291 3327 3373 3415 3424 338 529
0.15.0 3262 3291/3333 3488 3524 3571 3614 3627 390 589
0.18.0 3537 3583/3625 3787 3823 3870 3914 3936 474 636
0.20.0 3787 3833/3875 4051 4087 4140 4184 4207 482 642
0.21.0 3855 3899/3941 4117 4153 4206 4250 4273 461 579
0.22.0 3955 3997/4039 4231 4267 4320 4364 4389 497 624
0.23.0 4005 4047/4089 4281 4316 4384 4420 4445 510 642
0.24.0 4056 4098/4140 4332 4367 4435 4471 4496 524 667
0.27.0 4166 4208/4250 4450 4485 4553 4589 4614 590 747
0.28.0 4289 4328/4371 4565 4600 4668 4704 4729 598 755
0.29.0 4249 4288/4331 4525 4560 4628 4664 4689 598 755
0.30.0 4187 4226/4269 4463 4498 4566 4602 4627 603 757
0.31.0 4149 4188/4231 4427 4462 4530 4566 4591 600 754
0.32.0 3940 3979/4022 4207 4242 4304 4340 4365 600 754
0.33.0 3906 3945/3988 4173 4208 4270 4306 4331 599 753
"""
VLLM_MRV2 = """
release cycle kv.meta verify.forward accept kv.meta draft accept.sample extend.forward draft.all draft.steps draft.forward draft.fused
0.12.0 859 869/878 929/942 960 991 995 635 231 285/309 - - -
0.14.0 869 878/884 927/944 962 989 993 640 233 288/310 - - -
0.15.0 801 813/815 889/908 927 964 968 730 241 299/324 - - -
0.18.0 875 886/888/938/970 1012/1036 1091 1135 1140 820 260 341/372 - - -
0.20.0 955 967/969/1007/1043 1096/1115 1177 1238 1252 898 489/494 556/558 - - -
0.21.0 991 1003/1005/1043/1079 1132/1151 1213 1274 1288 932 547/552 - 589 329/331 -
0.22.0 1009 1021/1023/1061/1121 1174/1193 1256 1317 1331 962 549/554 - 591 331/333 -
0.23.0 1082 1095/1097/1135/1195 1247/1271/1276 1344 1405 1423 1034 230/235 - 273 441/443 -
0.24.0 1101 1114/1116/1162/1197 1262/1287/1292 1360 1422 1440 1062 229/234 - 272 412/414 -
0.27.0 1209 1222/1224/1270/1315 1392/1418/1423 1495 1554 1572 1168 223/228 - 266 415/417 -
0.28.0 1408 1422/1424/1480/1535 1635/1661/1666 1749 1809 1828 1358 298/303 - 348 497/499 543
0.29.0 1517 1531/1533/1594/1657 1743/1771/1776 1861 1921 1940 1445 307/312 - 363 517/519 563
0.30.0 1631 1646/1648/1717/1811 1909/1943/1948 2048 2115 2143 1559 316/321 - 383 547/549 593
0.31.0 1676 1692/1694/1772/1870 1968/2002/2007 2096 2176 2204 1605 309/314 - 376 540/542 586
0.32.0 1719 1735/1737/1815/1915 2006/2039/2044 2137 2217 2239 1647 280/285 - 354 520/522 552
0.33.0 1764 1780/1786/1865/1967 2059/2092/2097 2200 2286 2308 1688 280/285 - 361 532/534 564
"""
VLLM_CORE = """
release step step_with_batch_queue allocate_slots
0.10.2.post2 280 308 253/474
0.11.2 327 362 278/551
0.12.0 331 366 307/572
0.14.0 370 411 354/618
0.15.0 369 410 429/710
0.18.0 378 419 453/722
0.20.0 402 443 467/758
0.21.0 406 447 425/702
0.22.0 428 469 444/721
0.23.0 443 484 462/761
0.24.0 479 519 525/874
0.27.0 584 625 578/973
0.28.0 583 624 631/1033
0.29.0 597 638 658/1077
0.30.0 589 630 729/1159
0.31.0 630 670 747/1209
0.32.0 657 698 778/1256
0.33.0 667 708 914/1435
"""

SPECULATIVE = "sglang/srt/speculative/"
MANAGERS = "sglang/srt/managers/"
CORE = "vllm/v1/engine/core.py"
RUNNER_V1 = "vllm/v1/worker/gpu_model_runner.py"
RUNNER_V2 = "vllm/v1/worker/gpu/model_runner.py"
PROPOSER = "vllm/v1/spec_decode/"
SPECULATOR = "vllm/v1/worker/gpu/spec_decode/"
FILES = {
    "mixin": MANAGERS + "scheduler_output_processor_mixin.py",
    "brp": MANAGERS + "scheduler_components/batch_result_processor.py",
    "eagle_utils": SPECULATIVE + "eagle_utils.py",
    "eagle_info": SPECULATIVE + "eagle_info.py",
    "eagle_info_v2": SPECULATIVE + "eagle_info_v2.py",
}
# Columns of two sites with one point's name.
NAMES = {"extend.graph": "extend.forward", "extend.eager": "extend.forward"}
# The one graph of all steps has a point name of its own on SGLang only.
VLLM_NAMES = {"draft.all": "draft.forward", "draft.fused": "draft.forward"}

Expected = tuple[str, str, int]
"""File (how its path ends or begins), point name, line."""


def compare(engine: str, version: str, points: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """How many expected lines hold a place of their point in ``points`` (a plan's), and what differs."""
    equal, differing = 0, []
    for file, name, line in expected(engine, version):
        if found_at(points, file, name, line):
            equal += 1
        else:
            found = sorted(at for path, own, at in _places(points) if file in path and own == name)
            differing.append(f"{name} in {file}: the reference has line {line}, the plan {found}")
    return equal, differing


def found_at(points: Sequence[Mapping[str, Any]], file: str, name: str, line: int) -> set[str]:
    """The files with a place of the point ``name`` at that line, among those whose path holds ``file``."""
    return {path for path, own, at in _places(points) if file in path and name == own and line == at}


def _places(points: Sequence[Mapping[str, Any]]) -> list[Expected]:
    places = [(str(point["path"]), str(point["name"]), int(point["line"])) for point in points]
    # The step functions are given by the line of their definition.
    return places + [(str(point["path"]), "in " + str(point["name"]), int(point["function_line"])) for point in points]


def expected(engine: str, version: str) -> Iterator[Expected]:
    """Every place that the reference lists for one release of ``engine``."""
    if engine == "sglang":
        yield from _sglang(version)
    elif engine == "vllm":
        yield from _vllm(version)


def _row(table: str, version: str) -> dict[str, list[int]]:
    """Line numbers by column; a column that occurs twice is joined. Words stay under ``FILE`` and ``COMMON``."""
    head, *rows = [line.split() for line in table.strip().splitlines()]
    result: dict[str, list[int]] = {}
    for row in rows:
        if row[0] != version:
            continue
        for name, cell in zip(head[1:], row[1:], strict=True):
            numbers = [int(part) for part in cell.split("/")] if cell[0].isdigit() else []
            result.setdefault(name, []).extend(numbers)
    return result


def _word(table: str, version: str, column: str) -> str:
    head, *rows = [line.split() for line in table.strip().splitlines()]
    return next((row[head.index(column)] for row in rows if row[0] == version), "")


def _sglang(version: str) -> Iterator[Expected]:
    first = _row(SGLANG_V1, version)
    elsewhere = FILES.get(_word(SGLANG_V1, version, "FILE"), "")
    for name, lines in first.items():
        file = elsewhere if name == "kv.move" else SPECULATIVE + "eagle_worker.py"
        yield from ((file, NAMES.get(name, name), line) for line in lines)
    common = _word(SGLANG_V2, version, "COMMON") == "c"
    second = _row(SGLANG_V2, version)
    in_common = {"accept.tree", "verify", "verify.target", "accept.sample", "kv.move"} if common else set()
    for name, lines in second.items():
        file = SPECULATIVE + ("eagle_worker_common.py" if name in in_common else "eagle_worker_v2.py")
        if name == "kv.schedule":
            file = FILES[_word(SGLANG_V2, version, "FILE")]
        if name == "kv.meta" and common:
            yield from ((SPECULATIVE + "eagle_worker", name, line) for line in lines)
            continue
        yield from ((file, NAMES.get(name, name), line) for line in lines)
    shared = _row(SGLANG_SHARED, version)
    files = {"cycle": MANAGERS + "scheduler.py", "target": MANAGERS + "tp_worker.py"}
    files["output"] = FILES.get(_word(SGLANG_SHARED, version, "FILE"), "")
    for name, file in files.items():
        yield from ((file, name, line) for line in shared.get(name, []))


def _vllm(version: str) -> Iterator[Expected]:
    for name, lines in _row(VLLM_MRV1, version).items():
        file = PROPOSER if name in ("extend.forward", "draft.forward") else RUNNER_V1
        yield from ((file, name, line) for line in lines)
    in_speculator = {"extend.forward", "draft.all", "draft.steps", "draft.forward", "draft.fused"}
    for name, lines in _row(VLLM_MRV2, version).items():
        file = SPECULATOR if name in in_speculator else RUNNER_V2
        yield from ((file, VLLM_NAMES.get(name, name), line) for line in lines)
    core = _row(VLLM_CORE, version)
    for line in [*core.get("step", []), *core.get("step_with_batch_queue", [])]:
        yield CORE, "in schedule.step", line
    for line in core.get("allocate_slots", []):
        yield "vllm/v1/core/sched/scheduler.py", "kv.schedule", line
