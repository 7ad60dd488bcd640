// The facilitator's endpoints in the document. The facilitator serves no document of its own, since it has only three
// endpoints. These routes are for the document alone: the gateway does not serve them.
import { operation, type ServerDoc } from "../../http/openapi.ts";
import { requirementsOf, settleRequestJson } from "../../x402/codec.ts";
import { NETWORK, SCHEME, TOKEN, X402_VERSION } from "../../x402/kind.ts";
import { SettleRequest, SettleResponse, SupportedKinds } from "../../x402/schemas.ts";
import type { Payment } from "../../x402/types.ts";

const MUTUAL: ServerDoc = {
  url: "{facilitator_url}",
  description: "The facilitator's port with mutual TLS",
  variables: {
    facilitator_url: {
      default: "https://facilitator.example.com:8443",
      description: "As a tenant's settlement configuration names it.",
    },
  },
};

const PLAIN: ServerDoc = {
  url: "{open_url}",
  description: "The facilitator's plain port",
  variables: {
    open_url: { default: "http://facilitator.example.com:8081", description: "For whoever watches it." },
  },
};

const PAYER = "0x70997970c51812dc3a010c7d01b50e0d17dc79c8";
const PAYEE = "0x2096ed1b9b1c4b4a5f8a0b7f3d1d5b6a7c8d9e0f";
const PRICE = 10_000n;

const payment: Payment = {
  x402Version: X402_VERSION,
  scheme: SCHEME,
  network: NETWORK,
  authorization: {
    from: PAYER,
    to: PAYEE,
    value: PRICE,
    validAfter: 1_795_255_200n,
    validBefore: 1_795_255_860n,
    nonce: "0x476d01a9c531d55412e2a2775c2ba2d10613e730b84248187df77fbec7b30441",
  },
  signature: `0x${"2d".repeat(64)}1b`,
};

const request = settleRequestJson(
  payment,
  requirementsOf({
    amount: PRICE,
    payTo: PAYEE,
    resource: "https://gateway.example.com/v1/proxy/agt_0199a7c2-5d1e-7c3a-9b62-3f0a4d5e6f70",
    description: "One call of agt_0199a7c2-5d1e-7c3a-9b62-3f0a4d5e6f70",
  }),
);

const TRANSACTION = "0x3eac2f19045bb22f960302d195991d285ba7b0664d54c50663d8bd36cbf9b2a2";
const answer = { network: NETWORK, payer: PAYER };
const failure = { success: false, errorReason: "payment could not be collected" };

const settle = operation({
  tag: "Facilitator",
  security: "clientCertificate",
  servers: [MUTUAL],
  summary: "Settle a payment",
  description:
    "Verifies the payment anew, simulates it, collects it by `transferWithAuthorization` and answers when it is in a " +
    "block, or after the inclusion timeout. A payment that is known already is answered from its record, so a request " +
    "may be sent again as often as its answer is lost: the money moves once. The same authorization with other " +
    "requirements, or from another account, is a failure that names its transaction while that may land or has landed.",
  body: { schema: SettleRequest, description: "At most 64 KiB.", example: request },
  responses: [
    {
      status: "ok",
      description: "What became of it.",
      schema: SettleResponse,
      examples: {
        collected: { success: true, transaction: TRANSACTION, ...answer },
        "not collected": { ...failure, transaction: "", ...answer },
        "may still land": { ...failure, transaction: TRANSACTION, ...answer },
      },
    },
  ],
  errors: ["invalid_request", "denied", "over_limit", "unavailable"],
  answers: {
    invalid_request: {
      description:
        "The body is malformed, larger than 64 KiB, or no JSON, or the value is 0. The message names the field.",
      example: "paymentPayload.payload.authorization.value: must be a string of decimal digits, of at most 256 bits",
    },
    denied: {
      description: "The client certificate belongs to no account, or the account is disabled.",
      example: "no active account has this certificate",
    },
    over_limit: {
      description:
        "With Retry-After, over what passes by itself: the account's daily ceiling, its gas of the day or its share of the settlements at work, or after too many reverts of the payer on this day. Without it, over the account's limit of one transaction, below the least value, to the payer itself, or of another network or token. Nothing was claimed.",
      example: "the payment is outside the limits of this account",
    },
    unavailable: {
      description:
        "No node of the chain answers, the gas wallet is low, the same payment is being settled just now, others of the payer's payments hold its balance, or the facilitator is shutting down.",
      example: "this payment is being settled",
    },
  },
});

const supported = operation({
  tag: "Facilitator",
  open: true,
  servers: [MUTUAL, PLAIN],
  summary: "Supported kinds",
  description: "The one kind of payment that this facilitator settles.",
  responses: [
    {
      status: "ok",
      description: "The kinds.",
      schema: SupportedKinds,
      example: {
        kinds: [{ x402Version: X402_VERSION, scheme: SCHEME, network: NETWORK, asset: TOKEN }],
      },
    },
  ],
  errors: ["unavailable"],
});

export const FACILITATOR_ROUTES = [
  { method: "POST", path: "/settle", hooks: { detail: settle } },
  { method: "GET", path: "/supported", hooks: { detail: supported } },
];
