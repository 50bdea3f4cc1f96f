"""Sokoban levels: rules, reading and drawing, a solver, and a generator that proves each level can be solved.

A level is immutable; cells are (row, column). A certificate is a string of moves that solves its level.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

Cell = tuple[int, int]
MOVES: dict[str, Cell] = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
DRAWN = {"player": "*", "player on goal": "%", "box": "@", "goal": "X", "box on goal": "$", "wall": "+", "floor": "-"}
BOXOBAN = {"#": "+", "@": "*", "$": "@", ".": "X", " ": "-", "*": "$", "+": "%"}
WALL_SHARE = 0.15  # of the inner cells of a new level
EVAL_SHARE = 8  # one level in eight belongs to the eval split, whatever the seed
MAX_MISSES = 3000  # attempts in a row without a new level, and there are hardly any left
SOLVER_STATES = 300  # so long is each new level thought about; most need fewer


@dataclass(frozen=True)
class Level:
    """Walls and goals, where the boxes are, and where the player stands."""

    height: int
    width: int
    walls: frozenset[Cell]
    goals: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def is_solved(self) -> bool:
        """Every box stands on a goal."""
        return self.boxes <= self.goals

    def free(self, cell: Cell) -> bool:
        """Nothing stands in the way of the player there."""
        inside = 0 <= cell[0] < self.height and 0 <= cell[1] < self.width
        return inside and cell not in self.walls and cell not in self.boxes


Push = tuple["Push | None", Level, Cell, str]
"""The push before it, the level before it, where the player has to stand, and its direction."""


@dataclass(frozen=True)
class Board:
    """Where the player can walk, by one bit per cell: a region is filled some ten times faster than cell by cell.

    Rows are followed by one column that cannot be entered, so that a shift by one does not reach the next row.
    """

    stride: int
    floor: int

    @classmethod
    def of(cls, level: Level) -> Board:
        """The board of a level without its boxes."""
        board = cls(level.width + 1, 0)
        cells = itertools.product(range(level.height), range(level.width))
        return replace(board, floor=sum(board.bit(cell) for cell in cells if cell not in level.walls))

    def bit(self, cell: Cell) -> int:
        """The bit of a cell; 0 beyond the upper and left edge."""
        place = cell[0] * self.stride + cell[1]
        return 1 << place if place >= 0 else 0

    def region(self, boxes: frozenset[Cell], player: Cell) -> int:
        """Bits of all cells that the player can walk to."""
        free, stride, region, before = self.floor, self.stride, self.bit(player), 0
        for box in boxes:
            free &= ~self.bit(box)
        while region != before:
            before = region
            region |= (region << 1 | region >> 1 | region << stride | region >> stride) & free
        return region


def apply_move(level: Level, move: str) -> Level:
    """The level after a move of U, D, L, R; a move that is not possible changes nothing."""
    step = MOVES[move]
    target = _add(level.player, step)
    if level.free(target):
        return replace(level, player=target)
    beyond = _add(target, step)
    if target in level.boxes and level.free(beyond):
        return replace(level, player=target, boxes=level.boxes - {target} | {beyond})
    return level


def replay(level: Level, moves: str) -> Level:
    """The level after all moves; characters that are not moves are passed over."""
    for move in moves:
        if move in MOVES:
            level = apply_move(level, move)
    return level


def parse_level(text: str) -> Level:
    """Read the drawing of `render_level`, cells separated by spaces or not. `ValueError` says what is wrong."""
    rows = [line.replace(" ", "") for line in text.strip().splitlines() if line.strip()]
    width = max(map(len, rows), default=0)
    cells: dict[str, set[Cell]] = {mark: set() for mark in DRAWN.values()}
    for y, row in enumerate(rows):
        for x, mark in enumerate(row.ljust(width, "+")):
            if mark not in cells:
                raise ValueError(f"{mark!r} in line {y + 1} of a level: cells are {' '.join(cells)}")
            cells[mark].add((y, x))
    players = cells["*"] | cells["%"]
    if len(players) != 1:
        raise ValueError(f"a level needs one player, this one has {len(players)}")
    goals, boxes = cells["X"] | cells["%"] | cells["$"], cells["@"] | cells["$"]
    if not boxes or len(boxes) > len(goals):
        raise ValueError(f"a level needs boxes, and a goal for each: this one has {len(boxes)} and {len(goals)} goals")
    return Level(len(rows), width, frozenset(cells["+"]), frozenset(goals), frozenset(boxes), players.pop())


def render_level(level: Level) -> str:
    """One line per row, cells separated by spaces."""
    return "\n".join(" ".join(_mark(level, (y, x)) for x in range(level.width)) for y in range(level.height))


def read_boxoban(path: Path) -> list[Level]:
    """All levels of a file of the Boxoban collection: blocks that begin with `; number`."""
    blocks = [block.split("\n", 1) for block in ("\n" + path.read_text(encoding="utf-8-sig")).split("\n;")[1:]]
    levels = []
    for number, drawing in (block for block in blocks if len(block) == 2):
        try:
            # A space is floor there: it must not be taken for the space between two cells.
            levels.append(parse_level("".join(BOXOBAN.get(mark, mark) for mark in drawing)))
        except ValueError as error:
            raise ValueError(f"{path}, level {number.strip()}: {error}") from None
    if not levels:
        raise ValueError(f"{path} holds no level: each begins with a line like '; 0'")
    return levels


def solve(level: Level, max_states: int = 20_000) -> str | None:
    """Moves with the fewest pushes (A* over pushes), or None: there are none, or more states than `max_states`.

    The bound is the distance, in pushes of a lonely box, from each box to its nearest goal.
    """
    distance = _push_distances(level)
    if any(box not in distance for box in level.boxes):
        return None
    order, board = itertools.count(), Board.of(level)
    region = board.region(level.boxes, level.player)
    queue: list[tuple[int, int, Level, int, Push | None]] = [(0, next(order), level, region, None)]
    best = {(level.boxes, region): 0}
    while queue and len(best) <= max_states:
        _, _, here, region, last = heapq.heappop(queue)
        if here.is_solved:
            return _moves_of(last)
        pushes = best[here.boxes, region] + 1
        for box, (move, step) in itertools.product(here.boxes, MOVES.items()):
            ahead = _add(box, step)
            if ahead not in distance or not region & board.bit(_back(box, step, 1)) or not here.free(ahead):
                continue
            boxes = here.boxes - {box} | {ahead}
            after = board.region(boxes, box)
            if pushes < best.get((boxes, after), pushes + 1):
                best[boxes, after] = pushes
                bound = pushes + sum(distance[each] for each in boxes)
                push = (last, here, _back(box, step, 1), move)
                heapq.heappush(queue, (bound, next(order), replace(here, player=box, boxes=boxes), after, push))
    return None


def _moves_of(push: Push | None) -> str:
    """All moves up to and with a push: the ways to the boxes are looked for only now, when they are wanted."""
    parts = []
    while push is not None:
        push, level, behind, move = push
        parts.append(_way(level, behind) + move)
    return "".join(reversed(parts))


def count_pushes(level: Level, moves: str) -> int:
    """How many of the moves push a box."""
    pushes = 0
    for move in moves:
        after = apply_move(level, move)
        pushes += after.boxes != level.boxes
        level = after
    return pushes


def build_level(
    draw: random.Random, height: int, width: int, num_boxes: int, max_depth: int, min_pushes: int
) -> tuple[Level, str] | None:
    """One random level with its certificate, or None when this attempt came to nothing.

    The inside of `height` x `width` cells has a border of walls around it. The level is played backwards from its
    solved state: boxes are pulled off their goals, so the way back is a solution. It is solved again with the fewest
    pushes where that is quick, so that `min_pushes` and `max_depth` (moves) mean what they say.
    """
    inside = [(y, x) for y in range(1, height + 1) for x in range(1, width + 1)]
    border = set(itertools.product(range(height + 2), range(width + 2))) - set(inside)
    inner_walls = set(draw.sample(inside, round(WALL_SHARE * draw.random() * 2 * len(inside))))
    floor = [cell for cell in inside if cell not in inner_walls]
    if len(floor) < 2 * num_boxes + 2:
        return None
    goals = frozenset(draw.sample(floor, num_boxes))
    player = draw.choice([cell for cell in floor if cell not in goals])
    solved = Level(height + 2, width + 2, frozenset(border | inner_walls), goals, goals, player)
    level, certificate = _play_backwards(draw, solved, num_pulls=6 * num_boxes + draw.randint(0, 6 * num_boxes))
    if len(level.boxes - goals) < max(1, num_boxes // 2):
        return None
    certificate = solve(level, max_states=SOLVER_STATES) or certificate
    if len(certificate) > max_depth or count_pushes(level, certificate) < min_pushes:
        return None
    return level, certificate


def build_levels(
    num_levels: int,
    *,
    split: str,
    seed: int,
    widths: tuple[int, int],
    heights: tuple[int, int],
    boxes: tuple[int, int],
    max_depth: int,
    min_pushes: int,
) -> list[tuple[Level, str]]:
    """`num_levels` different levels of one split with certificates, a pure function of the arguments.

    Pairs are (least, most); the number of boxes grows with the area. Levels that are mirrored or turned versions of
    each other count as the same one, and a hash of that one decides its split: splits share no level.
    """
    draw = random.Random(f"{split}-{seed}")
    found: dict[bytes, tuple[Level, str]] = {}
    misses = 0
    while len(found) < num_levels and misses < MAX_MISSES:
        misses += 1
        width, height = draw.randint(*widths), draw.randint(*heights)
        num_boxes = _scale_boxes(width * height, widths, heights, boxes)
        made = build_level(draw, height, width, num_boxes, max_depth, min_pushes)
        if made is None:
            continue
        name = fingerprint(made[0])
        if split_of(name) == split and name not in found:
            found[name] = made
            misses = 0
    if len(found) < num_levels:
        raise ValueError(
            f"found only {len(found)} of {num_levels} levels of {widths[0]}-{widths[1]} x {heights[0]}-{heights[1]} "
            f"cells with {boxes[0]}-{boxes[1]} boxes: ask for fewer, for larger ones, or for fewer boxes"
        )
    return list(found.values())


def fingerprint(level: Level) -> bytes:
    """The same bytes for a level and its mirrored and turned versions."""
    rows = render_level(level).split("\n")
    grid = [row.split(" ") for row in rows]
    drawings = []
    for _ in range(4):
        grid = [list(row) for row in zip(*grid[::-1], strict=True)]
        drawings += ["\n".join(map("".join, grid)), "\n".join("".join(reversed(row)) for row in grid)]
    return hashlib.blake2b(min(drawings).encode(), digest_size=16).digest()


def split_of(name: bytes) -> str:
    """The split a level belongs to, by its fingerprint."""
    return "eval" if name[0] % EVAL_SHARE == 0 else "train"


def iterate_files(levels: Iterable[str] | str) -> Iterator[Path]:
    """The files meant by a path, a folder of .txt files, or several of them. `ValueError` when there are none."""
    for name in [levels] if isinstance(levels, str) else levels:
        path = Path(name).expanduser()
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise ValueError(f"levels {name!r}: no such file, and no folder with .txt files")
        yield from files


def _play_backwards(draw: random.Random, level: Level, num_pulls: int) -> tuple[Level, str]:
    """The level after random pulls of its boxes, and the moves that undo them."""
    board, undo = Board.of(level), ""
    region = board.region(level.boxes, level.player)
    seen = {(level.boxes, region)}
    for _ in range(num_pulls):
        pulls = list(itertools.product(sorted(level.boxes), MOVES.items()))
        draw.shuffle(pulls)
        for box, (move, step) in pulls:
            near, far = _back(box, step, 1), _back(box, step, 2)
            if not region & board.bit(near) or not level.free(far):
                continue
            boxes = level.boxes - {box} | {near}
            after = board.region(boxes, far)
            if (boxes, after) not in seen:
                seen.add((boxes, after))
                # Undone, the pull is a push from `far`; the player is then at `near` and walks back to where it was.
                undo = move + _way(replace(level, player=near), level.player) + undo
                level, region = replace(level, player=far, boxes=boxes), after
                break
        else:
            break
    return level, undo


def _way(level: Level, target: Cell) -> str:
    """A shortest way of the player to a cell that it can reach."""
    paths = {level.player: ""}
    queue = deque([level.player])
    while target not in paths:
        here = queue.popleft()
        for move, step in MOVES.items():
            there = _add(here, step)
            if there not in paths and level.free(there):
                paths[there] = paths[here] + move
                queue.append(there)
    return paths[target]


def _push_distances(level: Level) -> dict[Cell, int]:
    """Pushes that a lonely box needs from each cell to the nearest goal; cells from which it cannot be are missing."""
    alone = replace(level, boxes=frozenset())
    distance = dict.fromkeys(level.goals, 0)
    queue = deque(level.goals)
    while queue:
        here = queue.popleft()
        for step in MOVES.values():
            before, player = _back(here, step, 1), _back(here, step, 2)
            if before not in distance and alone.free(before) and alone.free(player):
                distance[before] = distance[here] + 1
                queue.append(before)
    return distance


def _scale_boxes(area: int, widths: tuple[int, int], heights: tuple[int, int], boxes: tuple[int, int]) -> int:
    least, most = widths[0] * heights[0], widths[1] * heights[1]
    share = (area - least) / (most - least) if most > least else 1.0
    return round(boxes[0] + share * (boxes[1] - boxes[0]))


def _mark(level: Level, cell: Cell) -> str:
    if cell in level.walls:
        return DRAWN["wall"]
    on_goal = " on goal" if cell in level.goals else ""
    if cell == level.player:
        return DRAWN["player" + on_goal]
    if cell in level.boxes:
        return DRAWN["box" + on_goal]
    return DRAWN["goal" if on_goal else "floor"]


def _add(cell: Cell, step: Cell) -> Cell:
    return cell[0] + step[0], cell[1] + step[1]


def _back(cell: Cell, step: Cell, count: int) -> Cell:
    return cell[0] - count * step[0], cell[1] - count * step[1]
