import { expect, test } from "bun:test";
import { Fault } from "../core/fault.ts";
import { createLargeResponses, type LargeResponses, piecesOf, type ResponseParts } from "./responses.ts";

const KIB = 1024;
const SIZE = 1024 * KIB;
/** More than half of what a tenant alone may have, so that two of one tenant do not go together. */
const LONG = "x".repeat(512 * KIB);

const PIECE = "x".repeat(32 * KIB);

const giving = (waitMsMax = 60_000) => createLargeResponses({ bytesMax: SIZE, waitMsMax }).respond;
const asked = (tenant = "acme", signal?: AbortSignal) => ({
  tenant,
  request: new Request("http://localhost/", signal ? { signal } : {}),
});
const text = async () => LONG;
const turns = async (count: number) => {
  for (let turn = 0; turn < count; turn++) await new Promise((resolve) => setImmediate(resolve));
};
const kindOf = (promise: Promise<unknown>) =>
  promise.then(
    () => "given",
    (error) => (error instanceof Fault ? error.kind : String(error)),
  );

function* failing(): Generator<string, void> {
  yield "{";
  throw new Error("the store is away");
}

/** Asks for answers and takes none, until there is no room. Gives how much is held then. */
async function filled(give: LargeResponses["respond"], tenant: string): Promise<number> {
  for (let held = 0; ; held += PIECE.length) {
    if ((await kindOf(give(asked(tenant), async () => PIECE))) !== "given") return held;
  }
}

test("a short answer is sent whole, whatever the tenant's callers have not taken", async () => {
  const give = giving(1);
  const held = await filled(give, "acme");
  const short = "x".repeat(16 * KIB);
  for (let bytes = held; bytes < SIZE; bytes += short.length) {
    const answer = await give({ ...asked(), status: "created", type: "text/plain" }, async () => short);
    expect(answer.status).toBe(201);
    expect(answer.headers.get("content-type")).toBe("text/plain");
  }
});

test.each([0, 1, 2, 3])("a long text is sent as it was, wherever its pieces end (%d)", async (shift) => {
  const long = JSON.stringify({ text: "…".repeat(shift) + "a".repeat(shift) + "🙂é".repeat(100 * KIB) });
  expect(Array.from(piecesOf(long)).length).toBeGreaterThan(4);
  const answer = await giving()(asked(), async () => long);
  expect(answer.headers.get("content-type")).toBe("application/json");
  expect(Buffer.from(await answer.bytes()).equals(Buffer.from(long))).toBe(true);
});

test("no more of an answer is made than its caller takes", async () => {
  let made = 0;
  function* pieces(): Generator<string, void> {
    for (; made < 100; made++) yield "x".repeat(64 * KIB);
  }
  const answer = await giving()(asked(), async () => ({ weight: 64 * KIB, pieces: pieces() }));
  const reader = answer.body?.getReader();
  await reader?.read();
  await turns(20);
  expect(made).toBeLessThan(3);
  await reader?.cancel();
});

test.each<[string, ResponseParts["pieces"], (answer: Response) => Promise<unknown>]>([
  ["has been taken", piecesOf(LONG), (answer) => answer.text()],
  ["is given up by its caller", piecesOf(LONG), async (answer) => answer.body?.cancel()],
  ["fails on its way", failing(), (answer) => answer.text().catch(() => {})],
])("an answer whose reader %s leaves its room to the next one of its tenant", async (_name, pieces, end) => {
  const give = giving();
  const first = await give(asked(), async () => ({ weight: LONG.length, pieces }));
  const next = give(asked(), text);
  let isGiven = false;
  void next.then(() => {
    isGiven = true;
  });
  await turns(10);
  expect(isGiven).toBe(false);
  await end(first);
  expect(await (await next).text()).toBe(LONG);
});

test("an answer that can't be made leaves its room too", async () => {
  const give = giving();
  const fails = async () => {
    throw new Error("the store is away");
  };
  await expect(give({ ...asked(), weight: LONG.length }, fails)).rejects.toThrow("the store is away");
  expect(await (await give(asked(), text)).text()).toBe(LONG);
});

test("a request that waits for room holds nothing of its answer, and gets it as it is then", async () => {
  const give = giving();
  const first = await give(asked(), text);
  let [made, dropped] = [0, 0];
  async function* pieces(): AsyncGenerator<string, void> {
    try {
      yield `${++made}`;
      yield LONG;
    } finally {
      dropped++;
    }
  }
  const next = give(asked(), async () => {
    const begun = pieces();
    const { value } = await begun.next();
    return { weight: LONG.length, first: value ?? "", pieces: begun };
  });
  await turns(10);
  expect([made, dropped]).toEqual([1, 1]);
  await first.body?.cancel();
  expect(await (await next).text()).toBe(`2${LONG}`);
});

test("an answer of which the weight is known is not made before there is room", async () => {
  const give = giving();
  const first = await give(asked(), text);
  let made = 0;
  const next = give({ ...asked(), weight: LONG.length }, async () => {
    made++;
    return LONG;
  });
  await turns(10);
  expect(made).toBe(0);
  await first.text();
  expect(await (await next).text()).toBe(LONG);
  expect(made).toBe(1);
});

test("another tenant's answers are given while one's callers take nothing", async () => {
  const give = giving(1);
  expect(await filled(give, "hostile")).toBeGreaterThan(0.8 * SIZE);
  for (let round = 0; round < 10; round++) {
    const answer = await give(asked("other"), async () => PIECE);
    expect(await answer.text()).toBe(PIECE);
  }
});

test("a wait for room ends with an answer that says so, or when its caller goes", async () => {
  const impatient = giving(1);
  await impatient(asked(), text);
  const refused = await impatient(asked(), text).catch((error: unknown) => error);
  expect(refused).toMatchObject({ kind: "unavailable", retryAfterSeconds: 1 });

  const give = giving();
  const first = await give(asked(), text);
  const gone = new AbortController();
  const left = kindOf(give(asked("acme", gone.signal), text));
  gone.abort();
  expect(await left).toBe("unavailable");
  await first.text();
  expect(await (await give(asked(), text)).text()).toBe(LONG);
});

test("of many waits for room that end in one moment, few callers are told in a turn of the event loop", async () => {
  const WAITING = 2_000;
  const hold = (ms: number) => {
    for (const until = performance.now() + ms; performance.now() < until; );
  };
  const give = giving(100);
  await give(asked(), text);
  let told = 0;
  const waits = Array.from({ length: WAITING }, () =>
    give({ ...asked(), weight: LONG.length }, text).catch(() => {
      told++;
      hold(0.1);
    }),
  );
  // By then the time of all is over.
  hold(300);
  let most = 0;
  for (let before = told; told < WAITING; before = told) {
    await turns(1);
    most = Math.max(most, told - before);
  }
  await Promise.all(waits);
  expect(most).toBeLessThan(200);
});

test("of many answers that are taken at once, few pieces are made in a turn of the event loop", async () => {
  const give = createLargeResponses({ bytesMax: 100 * SIZE, waitMsMax: 60_000 }).respond;
  let made = 0;
  function* pieces(): Generator<string, void> {
    for (let left = 20; left > 0; left--) {
      made++;
      yield PIECE;
    }
  }
  const parts = async () => ({ weight: LONG.length, pieces: pieces() });
  const answers = await Promise.all(Array.from({ length: 30 }, () => give(asked(), parts)));
  const all = Promise.all(answers.map((answer) => answer.text()));
  let most = 0;
  for (let before = made; made < 600; before = made) {
    await turns(1);
    most = Math.max(most, made - before);
  }
  expect(most).toBeLessThanOrEqual(16);
  expect((await all).every((given) => given === PIECE.repeat(20))).toBe(true);
});

interface Source extends AsyncIterable<number> {
  /** How many rows were asked for. */
  readonly asked: number;
  readonly isOver: boolean;
}

function rows(count: number, failsAt = -1): Source {
  const source = {
    asked: 0,
    isOver: false,
    async *[Symbol.asyncIterator]() {
      try {
        for (let i = 0; i < count; i++) {
          source.asked++;
          if (i === failsAt) throw new Error("the store is away");
          yield i;
        }
      } finally {
        source.isOver = true;
      }
    },
  };
  return source;
}

/** The answer with a list of what there is in `source`. */
function listed(
  source: AsyncIterable<number>,
  view: (row: number) => object,
  rest?: Readonly<Record<string, unknown>>,
): Promise<Response> {
  return createLargeResponses().jsonList(asked(), { name: "data", rows: () => source, view, ...(rest && { rest }) });
}

const small = (row: number) => ({ row, text: "…" });
const large = (row: number) => ({ row, text: "é".repeat(32 * KIB) });

test.each([0, 1, 100])("a short list of %d is sent whole, as its JSON would be", async (count) => {
  const response = await listed(rows(count), small, { total: count, limit: 20 });
  expect(response.headers.get("content-type")).toBe("application/json");
  const data = Array.from({ length: count }, (_, row) => small(row));
  expect(await response.text()).toBe(JSON.stringify({ data, total: count, limit: 20 }));
});

test("a list alone is sent as an object too", async () => {
  expect(await (await listed(rows(0), small)).text()).toBe('{"data":[]}');
});

test("of a long list no more is made than its caller takes", async () => {
  const source = rows(1_000);
  const response = await listed(source, large, { total: 1 });
  const begun = source.asked;
  expect(begun).toBeLessThan(30);
  const reader = response.body?.getReader() as ReadableStreamDefaultReader<Uint8Array>;
  await reader.read();
  for (let turns = 0; turns < 50; turns++) await new Promise((resolve) => setImmediate(resolve));
  expect(source.asked).toBe(begun);
  await reader.cancel();
  expect(source.isOver).toBe(true);

  const whole = await (await listed(rows(100), large, { total: 1 })).json();
  expect(whole).toEqual({ data: Array.from({ length: 100 }, (_, row) => large(row)), total: 1 });
});

test("a list that fails on the way never ends as if it were whole", async () => {
  await expect(listed(rows(10, 5), small)).rejects.toThrow("the store is away");
  const response = await listed(rows(1_000, 500), large);
  const broken = await response.text().catch((error: Error) => error.message);
  expect(broken).toBe("the store is away");
});

test("others have their turns while a long list is made", async () => {
  let turns = 0;
  let isDone = false;
  const turn = () => {
    turns++;
    if (!isDone) setImmediate(turn);
  };
  setImmediate(turn);
  const busy = (row: number) => {
    const until = performance.now() + 3;
    while (performance.now() < until);
    return { row };
  };
  await listed(rows(50), busy);
  isDone = true;
  expect(turns).toBeGreaterThanOrEqual(49);
});
