// The bounds of the process: what load, a tenant or an upstream can reach. Metrics, the doctor and the manual read the rows;
// code takes the sizes from `MAX`. What an operator may set stands in config/variables.ts, and constants of protocols and
// pauses of the process's own work stand where they are used.
import { ALLOWED_HOSTS_MAX, URL_CHARACTERS_MAX } from "../core/host.ts";

export interface Limit {
  readonly size: number;
  readonly unit: "bytes" | "characters" | "ms" | "count";
  /** `process`: of all callers together, shared out by tenant where tenants can take from it. `each`: of each such thing. */
  readonly per: "process" | "tenant" | "agent" | "each";
  /** What happens there: a status, a wait, or what is left out. */
  readonly beyond: string;
  /** What is bounded, in the words of the manual. */
  readonly what: string;
}

type LimitRow = [size: number, per: Limit["per"], beyond: string, what: string];

const row =
  (unit: Limit["unit"]) =>
  (...[size, per, beyond, what]: LimitRow): Limit => ({ size, unit, per, beyond, what });

const [bytes, characters, ms, count] = [row("bytes"), row("characters"), row("ms"), row("count")];
const KIB = 1024;
const MIB = 1024 * KIB;
const PROXY_BODY_BYTES = 32 * MIB;

const MEMORY = {
  bodyIntakeBytes: bytes(192 * MIB, "process", "waits, then 503", "bodies above 4 KiB that are coming in"),
  runningBodyBytes: bytes(96 * MIB, "process", "waits", "bodies of running calls"),
  captureBytes: bytes(112 * MIB, "process", "waits", "captured answers of polled calls"),
  streamCaptureBytes: bytes(96 * MIB, "process", "captures less", "captured answers of streamed calls"),
  toolListBytes: bytes(96 * MIB, "process", "the call fails", "tool lists that are being filtered"),
  streamDecoderBytes: bytes(96 * MIB, "process", "waits, then the call fails", "decoders of streamed answers"),
  decoderBytes: bytes(96 * MIB, "process", "waits, then the call fails", "decoders of polled answers"),
  aheadBytes: bytes(48 * MIB, "process", "reading pauses", "polled answers that wait to be processed"),
  streamAheadBytes: bytes(64 * MIB, "process", "reading pauses", "streamed answers that wait to be passed on"),
  responseBytes: bytes(64 * MIB, "process", "waits, then 503", "responses above 16 KiB that callers have not read yet"),
  policyBytes: bytes(64 * MIB, "process", "evicted", "policies in memory"),
  assetBytes: bytes(8 * MIB, "process", "waits, then 503", "files of the manual and of Swagger that are being sent"),
  secretBytes: bytes(8 * MIB, "process", "evicted", "cached secrets of Vault and of files"),
};

const REQUESTS = {
  bodyBytes: bytes(PROXY_BODY_BYTES, "each", "413", "body of a proxy call"),
  managementBodyBytes: bytes(MIB, "each", "413", "body of any other request"),
  // For the largest body on a line of half a megabit a second.
  bodyMs: ms(600_000, "each", "400", "time in which a whole body must arrive"),
  bodySilenceMs: ms(
    30_000,
    "each",
    "400",
    "pause within a body; with a length of at most 64 KiB, the time for all of it",
  ),
  bodyWaitMs: ms(5_000, "each", "503", "time that a body waits for memory"),
  evictionWaitMs: ms(1_000, "each", "slower ones are evicted", "wait of a body or decoder for memory of slower ones"),
  // Each holds up to a mebibyte that is not counted yet.
  bodiesWaiting: count(32, "process", "503", "bodies that wait for memory"),
  // The runtime parses what has come of all of them in one turn of the event loop.
  chunkedBodies: count(32, "process", "waits, then 503", "chunked bodies that are arriving"),
  chunkedBodiesWaiting: count(128, "process", "503", "chunked bodies that wait to be received"),
  chunkedWaiting: count(128, "process", "503, and closed", "requests with chunked bodies that wait to begin"),
  bodiesInOnePiece: count(8_192, "process", "503", "bodies of at most 64 KiB that are still arriving"),
  // A body of short texts takes a hundred times its bytes, with garbage not collected yet (measured).
  largeBodies: count(2, "process", "waits, then 503", "bodies above 16 KiB that are being read, except those of calls"),
  largeBodiesWaiting: count(64, "process", "503", "bodies above 16 KiB, except those of calls, that wait to be read"),
  limiterWaitMs: ms(5_000, "each", "503", "time that a request waits for one of a few slots"),
  strangerBodyBytes: bytes(16 * KIB, "each", "answered at once", "body of a waiting request without a valid token"),
  strangerLines: count(20, "process", "summed up", "log lines a second for requests without a valid token"),
  logCharacters: characters(4_194_304, "process", "dropped, and counted", "log lines that wait to be written"),
  // The largest body twice, on a line of five megabits a second.
  drainedBytes: bytes(2 * PROXY_BODY_BYTES, "each", "closed", "rest of a body that is read and dropped"),
  drainedMs: ms(60_000, "each", "closed", "time to read and drop the rest of a body"),
  drainedSilenceMs: ms(5_000, "each", "closed", "pause while the rest of a body is dropped"),
  drained: count(1_024, "process", "closed", "connections that drop the rest of a body"),
  drainedChunked: count(8, "process", "closed", "connections that drop the rest of a body in chunks"),
  // The client may wait for the answer before it sends more.
  drainedChunkedSilenceMs: ms(1_000, "each", "closed", "pause while the rest of a body in chunks is dropped"),
  responseWaitMs: ms(5_000, "each", "503", "time that a response waits for memory"),
  computeThreads: count(2, "process", "waits", "threads that check long bodies and signatures"),
  computeJobs: count(16_384, "process", "503", "bodies, texts and signatures that wait to be checked"),
  // More than the bodies and lists of tools that may be held.
  computeBytes: bytes(384 * MIB, "process", "503", "bytes of bodies and texts that wait to be checked"),
  // The largest body that is hardest to read takes two seconds of a core.
  computeMs: ms(30_000, "each", "503", "time to check one body, text or signature"),
  listsBegun: count(16, "process", "waits, then 503", "list responses that are being built"),
  tokenCharacters: characters(8_192, "each", "401", "token"),
  principalCharacters: characters(256, "each", "401", "tenant or user in a token"),
  tokensCharacters: characters(8 * MIB, "process", "evicted", "verified tokens in memory"),
  serviceModelBytes: bytes(256, "each", "400", "`X-Service-Model`"),
  idempotencyKeyCharacters: characters(255, "each", "400", "`Idempotency-Key`"),
  requestIdCharacters: characters(128, "each", "a new one is made", "`X-Request-ID`"),
  jsonDepth: count(64, "each", "400", "depth of JSON"),
  // More than fit into the largest object that is taken, which is metadata of 16 KiB.
  jsonKeys: count(4_096, "each", "400", "keys of a JSON object, except in calls"),
  jsonKeysCompared: count(100, "each", "no suggestion", "unknown keys that may be a misspelt required one"),
  jsonObjects: count(20_000, "each", "400", "objects in a JSON body, except in calls"),
  jsonItems: count(8_192, "each", "400", "items of a JSON array, except in calls"),
  jsonFreeValues: count(16_384, "each", "400", "values in metadata"),
  batchMessages: count(100, "each", "400", "messages of a JSON-RPC batch"),
  rpcNameBytes: bytes(KIB, "each", "400", "id, method or tool name in JSON-RPC"),
  echoedHeaders: count(32, "each", "400", "`Mcp-Param-*` headers"),
  waitSeconds: count(60, "each", "a shorter wait", "seconds of `Prefer: wait`"),
  retryAfterSeconds: count(60, "each", "a shorter time", "seconds of `Retry-After`"),
  agentsSearched: count(10_000, "each", "it asks for the ID", "agents in which `tollgate call` looks for a name"),
  pageItems: count(100, "each", "fewer items", "items on a page of a list"),
  // More than any route needs, whose IDs may be percent-encoded. What looks for a route takes time by the path's length.
  pathCharacters: characters(512, "each", "404", "path of a request"),
  searchCharacters: characters(256, "each", "400", "`q` of the list of agents"),
  plainConnections: count(256, "process", "an idle one is closed", "connections of the metrics or plain port"),
  plainPipelined: count(16, "each", "closed", "requests that wait on a connection of the metrics or plain port"),
  plainHeadBytes: bytes(16 * KIB, "each", "431", "head of a request to the metrics or plain port"),
  plainDrainedBytes: bytes(4 * MIB, "each", "closed", "rest of a body that the metrics or plain port drops"),
  plainPieces: count(4_096, "each", "closed", "chunks of a body to the metrics, plain or mutual-TLS port"),
  plainBodyBytes: bytes(KIB, "each", "413", "body of a request to the plain ports"),
  // All calls and streams that may run take 28,672; unfinished heads on all of these take 512 MiB (16 KiB each, measured).
  openFiles: count(32_768, "process", "a connection is closed or refused", "open files and connections"),
};

const CALLS = {
  runningCalls: count(4_096, "process", "waits", "polled calls that run"),
  // Otherwise small bodies could keep a large one out.
  extraBodies: count(8, "process", "waits", "bodies of running calls beyond their memory budget, one for each tenant"),
  callsRecording: count(256, "process", "no more are made", "finished calls that wait to be recorded"),
  runningStreams: count(4_096, "process", "waits, then 503", "streamed calls that run"),
  mcpConnections: count(8_192, "process", "waits, then 503", "MCP messages and streams that are no calls"),
  agentMcpConnections: count(1_024, "agent", "waits, then 503", "MCP messages and streams that are no calls"),
  resumedStreams: count(2_048, "process", "503", "resumed streams of calls that were accepted earlier"),
  // A caller holds its connection while it waits, so it does not wait for long.
  streamWaitMs: ms(9_000, "each", "503", "time that a caller waits for the slot of a stream"),
  streamsWaiting: count(4_096, "process", "503", "callers that wait for the slot of a stream"),
  agentStreamsWaiting: count(256, "agent", "503", "callers that wait for the slot of a stream"),
  callerSilenceMs: ms(300_000, "each", "the stream ends", "time that a caller leaves a stream unread"),
  waitingCallers: count(8_192, "process", "answered at once", "callers that wait for the end of a call"),
  capturedBytes: bytes(MIB, "each", "cut off", "captured body"),
  decisionsBuffered: count(20_000, "process", "written with the call", "policy decisions that wait to be written"),
  callersRated: count(200_000, "process", "counted from zero", "callers whose rate is counted for a policy"),
  rateBuckets: count(100_000, "process", "evicted", "token buckets in memory"),
  rateRefusals: count(10_000, "process", "evicted", "refusals of shared token buckets in memory"),
  policiesCompiled: count(2, "process", "waits, then 503", "policies that are being loaded"),
  // To pass over 200,000 used entries took 200 ms.
  cachePassedOver: count(64, "each", "the next one is evicted", "used entries of a cache that one eviction spares"),
  agentsCharacters: characters(8 * MIB, "process", "evicted", "agents in memory"),
  tenantKeys: count(10_000, "process", "evicted", "keys of tenants in memory"),
  // With more of them the database is far too slow, and memory would run out next.
  storeWaiting: count(20_000, "process", "503", "reads and writes that wait for the database"),
  // Together with those of other replicas they leave room below Postgres's usual limit of 100.
  storeWriters: count(7, "process", "waits, then 503", "connections of Postgres for writes"),
  storeFirstWriters: count(1, "process", "waits, then 503", "connections for urgent writes"),
  storeBatchers: count(2, "process", "waits, then 503", "connections for commands"),
  storeLargeBatchers: count(2, "process", "waits, then 503", "connections for commands with large bodies"),
  storeReaders: count(6, "process", "waits, then 503", "connections for reads"),
  storeFirstReaders: count(3, "process", "waits, then 503", "connections for urgent reads"),
  storeCounters: count(3, "process", "waits, then 503", "connections for shared counters"),
  // From the wait for a connection to the answer; the interface promises 10 s.
  // A command or a backup holds it for a moment.
  storeLockMs: ms(4_000, "process", "503", "time that another process may hold SQLite's write lock"),
  storeMs: ms(9_000, "each", "503", "waits of a request for the database, together; one read or write of other work"),
  spans: count(4_096, "process", "dropped, and counted", "spans that wait for the collector"),
  revokedUsers: count(50_000, "process", "refused", "users whose tokens are revoked"),
};

const UPSTREAMS = {
  upstreamHeadBytes: bytes(64 * KIB, "each", "the call fails", "head of an answer, and its trailers"),
  // As many as the runtime's `fetch` takes.
  upstreamFields: count(256, "each", "the call fails", "fields in the head of an answer"),
  // Honest servers send one or two.
  interimAnswers: count(100, "each", "the call fails", "interim answers before the final one"),
  // No honest answer has more. Each needs a decoder, and memory for the bytes between two.
  encodings: count(2, "each", "the call fails", "encodings of an answer"),
  // Enough for any answer: where there are many workers, they have more than the process's budget together.
  workerDecoderBytes: bytes(48 * MIB, "each", "waits, then the call fails", "decoders in a worker, at least"),
  decoderWaitMs: ms(10_000, "each", "the call fails", "time that a streamed answer waits for decoder memory"),
  toolAnswerBytes: bytes(16 * MIB, "each", "the call fails", "answer or event with a filtered tool list"),
  mcpSessions: count(1_000, "each", "the one unused longest is closed", "sessions with mcp servers in a worker"),
  mcpSideRequests: count(64, "each", "waits", "requests in a worker to mcp servers, for no call"),
  initializeBytes: bytes(128 * KIB, "each", "the call fails", "answer to `initialize`"),
  // No client could use more, and they would only fill memory.
  listedTools: count(10_000, "each", "the call fails", "tools in a filtered tool list"),
  listedAnswers: count(1_000, "each", "the call fails", "answers in a batch with a filtered tool list"),
  lookups: count(512, "process", "waits, then the call fails", "look-ups of names"),
  resolvedNames: count(1_024, "process", "evicted", "resolved names in memory"),
  targets: count(1_024, "process", "evicted", "URLs of upstreams in memory"),
  tlsContexts: count(128, "process", "evicted", "TLS contexts of client certificates in memory"),
};

const KEPT = {
  nameCharacters: characters(128, "each", "400", "name of an agent or a credential"),
  descriptionCharacters: characters(4_096, "each", "400", "description"),
  tags: count(32, "each", "400", "tags"),
  tagCharacters: characters(64, "each", "400", "tag"),
  metadataBytes: bytes(16 * KIB, "each", "400", "metadata"),
  urlCharacters: characters(URL_CHARACTERS_MAX, "each", "400", "URL"),
  // Enough for the tools of any known server. The row is read for each call, so it must stay small.
  pricedTools: count(500, "each", "400", "prices of single tools"),
  plaintextBytes: bytes(64 * KIB, "each", "400", "secret"),
  vaultRefCharacters: characters(1_024, "each", "400", "`vault_ref`"),
  allowedHosts: count(ALLOWED_HOSTS_MAX, "each", "400", "`allowed_hosts`"),
  policyRules: count(500, "each", "400", "rules of a policy"),
  policyList: count(1_000, "each", "400", "entries of a list in a rule"),
  // Longer than the name of any tool that can be called, with a wildcard.
  policyEntryCharacters: characters(1_024, "each", "400", "entry of a list in a rule"),
};

const PAYMENTS = {
  paymentHeaderCharacters: characters(16 * KIB, "each", "402", "payment header"),
  // A plain account's has 65; contract wallets need more.
  signatureBytes: bytes(4 * KIB, "each", "402", "signature of a payment"),
  // Clients take in 16 KiB of headers in all, and send this part of the challenge back in one.
  challengeCharacters: characters(256, "each", "cut off", "description of an agent in a challenge"),
  // Reading 10,000 took half a minute. A real challenge has a few.
  challengeOffers: count(64, "each", "nothing is signed", "offers of a challenge that `tollgate call` reads"),
  // The last of so many waits for six seconds.
  verifications: count(8_192, "process", "503", "signatures that wait to be verified"),
  facilitatorBytes: bytes(64 * KIB, "each", "the outcome is unknown", "answer of a facilitator"),
  // Each holds two connections, the caller's and the facilitator's, for as long as the facilitator is silent.
  firstAttempts: count(4_096, "process", "503", "settlement attempts in flight, with those in the background"),
  backgroundAttempts: count(128, "process", "waits", "settlements in the background"),
  facilitatorAttempts: count(32, "each", "waits", "settlements in the background at one facilitator"),
  troubledAttempts: count(2, "each", "waits", "settlements at a facilitator whose last answer timed out"),
  troubledFacilitators: count(10_000, "process", "the oldest is forgotten", "facilitators that are failing"),
  // 12 blocks of Base, and some: for a facilitator that names no time.
  settlementFinalMs: ms(30_000, "each", "checked again", "time until a settlement is checked once more"),
  settlementConfirmMs: ms(120_000, "each", "final as it is", "time that a second check stays unanswered"),
  confirmationsAtOnce: count(64, "tenant", "checked later", "settlements that a request for receipts checks"),
  // Signing with a larger one takes so long that a few handshakes would hold up everybody else's.
  rsaBits: count(4_096, "each", "400", "bits of the RSA key in a client bundle"),
  settleBodyBytes: bytes(64 * KIB, "each", "413", "body of `/settle`"),
  settlements: count(2_000, "process", "503", "settlements in flight at a facilitator, by account"),
  walletTransactions: count(2_000, "each", "503", "transactions of one key that are in no block yet"),
  settleConnections: count(4_096, "process", "an idle one is closed", "connections of the mutual-TLS port, by account"),
  certificates: count(16, "each", "409", "certificates of an account"),
  // An account chooses payers and nonces, so it could fill the table. Beyond it only the log has the reasons.
  accountNotes: count(10_000, "each", "not stored", "refusals of an account that are stored for a day"),
  paymentsTold: count(20_000, "process", "evicted", "ended payments that the metrics remember"),
};

/** By the headings of the manual; the first are the memory budgets. */
export const LIMITS = {
  Memory: MEMORY,
  "Connections and requests": REQUESTS,
  Calls: CALLS,
  "Answers of upstreams": UPSTREAMS,
  "What a tenant keeps": KEPT,
  Payments: PAYMENTS,
};

const ALL = { ...MEMORY, ...REQUESTS, ...CALLS, ...UPSTREAMS, ...KEPT, ...PAYMENTS };

export type LimitName = keyof typeof ALL;

export const MAX = Object.fromEntries(Object.entries(ALL).map(([name, { size }]) => [name, size])) as Readonly<
  Record<LimitName, number>
>;

export const IDEMPOTENCY_HOURS = 24;
export const BURST_DEFAULT = 20;
export const PAGE_LIMIT_DEFAULT = 20;
