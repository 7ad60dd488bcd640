// The fixed limits that several rooms share or the interface names. Those that an operator may move are in
// config/variables.ts; those of one mechanism stand with it.

const KIB = 1024;
const MIB = 1024 * KIB;

export const PROXY_BODY_BYTES_MAX = 32 * MIB;
export const MANAGEMENT_BODY_BYTES_MAX = MIB;
/** Bytes received of bodies that are still coming in, over the whole process; shared out by tenant. */
export const BODY_INTAKE_BYTES_MAX = 192 * MIB;
/** For the largest body on a line of half a megabit a second. */
export const BODY_INTAKE_MS_MAX = 600_000;
export const BODY_INTAKE_SILENCE_MS_MAX = 30_000;
/** Bodies in chunks that are coming in: each counts for its part of those bytes. */
export const CHUNKED_BODIES_MAX = 32;
/** Bytes held of answers that callers are still taking, over the whole process; shared out by tenant. */
export const ANSWER_BYTES_MAX = 64 * MIB;
/** How long another answer waits for a share of that. */
export const ANSWER_WAIT_MS_MAX = 5_000;
/** What is read and dropped of a body after its refusal: the largest one twice, on a line of five megabits a second. */
export const PASSED_OVER_BYTES_MAX = 2 * PROXY_BODY_BYTES_MAX;
export const PASSED_OVER_MS_MAX = 60_000;
export const PASSED_OVER_SILENCE_MS_MAX = 5_000;
/** On so many connections at a time, shared out by tenant; strangers are one. */
export const PASSED_OVER_COUNT_MAX = 1024;
/** Of bodies in chunks, which cost the event loop more, and whose clients may wait for the refusal before they send more. */
export const PASSED_OVER_CHUNKED_MAX = 8;
export const PASSED_OVER_CHUNKED_SILENCE_MS_MAX = 1_000;
export const CAPTURE_BYTES_MAX = MIB;
export const JSON_DEPTH_MAX = 64;
/** Of one object: more than fit into the largest one that is taken, which is metadata of 16 KiB. */
export const JSON_KEYS_MAX = 4096;
/** Of one list, likewise. */
export const JSON_ITEMS_MAX = 8192;
/** Of all values in metadata: a thing that is no more than 16 KiB has fewer. */
export const JSON_FREE_VALUES_MAX = 16_384;

export const SERVICE_MODEL_BYTES_MAX = 256;
export const IDEMPOTENCY_KEY_CHARACTERS_MAX = 255;
export const IDEMPOTENCY_HOURS = 24;
export const REQUEST_ID_CHARACTERS_MAX = 128;
export const WAIT_SECONDS_MAX = 60;
export const RETRY_AFTER_SECONDS_MAX = 60;

export const NAME_CHARACTERS_MAX = 128;
export const DESCRIPTION_CHARACTERS_MAX = 4096;
export const TAGS_MAX = 32;
export const TAG_CHARACTERS_MAX = 64;
export const METADATA_BYTES_MAX = 16 * KIB;
export const PLAINTEXT_BYTES_MAX = 65_536;
export const VAULT_REF_CHARACTERS_MAX = 1024;
export const BURST_DEFAULT = 20;

/** JSON-RPC messages of one batch, each of which is judged. */
export const BATCH_MESSAGES_MAX = 100;

export const PAGE_LIMIT_DEFAULT = 20;
export const PAGE_LIMIT_MAX = 100;

export const POLICY_RULES_MAX = 500;
/** Entries of one list of a rule. */
export const POLICY_LIST_MAX = 1000;
/** Longer than the name of any tool that can be called, with a wildcard. */
export const POLICY_ENTRY_CHARACTERS_MAX = 1024;

export const PAYMENT_HEADER_CHARACTERS_MAX = 16 * KIB;
/** Of a plain account 65; contract wallets need more. */
export const SIGNATURE_BYTES_MAX = 4 * KIB;
/** Clients take in 16 KiB of headers in all, and send this part of the challenge back in one. */
export const CHALLENGE_DESCRIPTION_CHARACTERS_MAX = 256;
export const SETTLE_BODY_BYTES_MAX = 64 * KIB;
/** When the gateway's nodes are asked whether a settlement stands, if its facilitator names no time: 12 blocks, and some. */
export const SETTLEMENT_FINAL_MS = 30_000;
/** After so long a collected payment counts as final, even if nobody answers. */
export const SETTLEMENT_CONFIRM_MS_MAX = 120_000;
