// Starts Swagger UI in the reader's browser, with what it lacks: it remembers the IDs of what was made and fills them into the
// operations that are tried next, it looks up IDs of what is there, it offers what is there where an operation would replace it, it
// is dark where the system is, it shows every response without holding the page, and it can be used by the keyboard and with a
// screen reader.

const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const followSystem = () => document.documentElement.classList.toggle("dark-mode", systemIsDark.matches);
followSystem();
systemIsDark.addEventListener("change", followSystem);

/** The operations of the document, read once: they are asked for at every step of the reader. */
const read = { document: undefined, operations: [] };
const operationsOf = (system) => {
  const document = system.specSelectors.specJson();
  if (document === read.document) return read.operations;
  const operations = Object.entries(document.get("paths")?.toJS() ?? {}).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, operation })),
  );
  return Object.assign(read, { document, operations }).operations;
};

/**
 * The page calls only the gateway that it came from, so endpoints of other servers are shown but can't be tried. Neither can a
 * stream of events that never ends: the page would wait for its end.
 */
const isTryable = (state, path, method) => {
  const operation = state.getIn(["json", "paths", path, method]);
  const types = operation?.getIn(["responses", "200", "content"])?.keySeq().toArray() ?? [];
  const servers = operation?.get("servers");
  const isHere = servers === undefined || servers.some((server) => server.get("url") === "/");
  return isHere && !types.includes("text/event-stream");
};

/** What deletes comes last, so that whoever tries one operation after the other keeps what the later ones need. */
const deletionsLast = (tagged) => {
  const isDeletion = (operation) => operation.getIn(["operation", "operationId"])?.startsWith("delete") ?? false;
  const all = tagged.toList().flatMap((section) => section.get("operations"));
  const deletions = all.filter(isDeletion);
  if (deletions.isEmpty()) return tagged;
  const details = tagged.first().get("tagDetails");
  const last = tagged
    .first()
    .set("tagDetails", details.merge({ name: CLEAN_UP, description: "Delete what was made above." }))
    .set("operations", deletions);
  return tagged
    .map((section) => section.update("operations", (list) => list.filterNot(isDeletion)))
    .set(CLEAN_UP, last);
};
const CLEAN_UP = "Clean up";

const ID = /\b(agt|cred|inv)_(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b/g;
const SESSION_HEADER = "Mcp-Session-Id";

/**
 * The newest IDs by their prefix, the newest first; which of them were made on this page; which are calls that have ended; and the
 * agent of each invocation.
 */
const remembered = { agt: [], cred: [], inv: [] };
const made = new Set();
const ended = new Set();
const agentOf = new Map();
/** The IDs of the examples, which are nobody's. */
const exampleIds = new Set();
/** What each operation's body was before IDs were filled in, and after. */
const filledBodies = new Map();

const prefixOf = (id) => id.split("_")[0];

const remember = (id) => {
  if (id.match(ID)?.[0] !== id) return;
  const ids = remembered[prefixOf(id)];
  ids.splice(0, ids.length, id, ...ids.filter((other) => other !== id));
};

const forget = (id) => {
  for (const ids of Object.values(remembered)) ids.splice(0, ids.length, ...ids.filter((other) => other !== id));
};

/** The body of a response; null where that is no JSON. */
const bodyIn = ({ text, headers }) => {
  try {
    return headers["content-type"]?.startsWith("application/json") ? JSON.parse(text) : null;
  } catch {
    return null;
  }
};

const listIn = (body) => [body?.data, body?.credentials].find(Array.isArray) ?? [];

/**
 * Learns from a response of this gateway. A list fills only what is not known yet. The body of a streamed call is the agent's,
 * which must not choose what the reader deletes next, so only the gateway's header counts there.
 */
const learn = (response, method, path) => {
  const { url, status, headers } = response;
  const [called] = url.match(ID) ?? [];
  if (method === "delete" && status === 204) return forget(called);
  const body = path.endsWith("/stream") ? null : bodyIn(response);
  const agent = path.startsWith("/v1/proxy/") ? called : body?.agent_id;
  for (const id of [body?.id, body?.invocation_id, headers["x-service-invocation-id"]]) {
    if (method === "post") made.add(id);
    learnId(id, agent);
  }
  learnEnds([body ?? {}, ...listIn(body)]);
  learnFirst(listIn(body));
};

const learnEnds = (calls) => {
  for (const { id, invocation_id = id, status } of calls)
    if (status === "succeeded" || status === "failed") ended.add(invocation_id);
};

const learnFirst = (list) => {
  const { id, agent_id } = list.find(({ status, suspended }) => status === "active" && !suspended) ?? list[0] ?? {};
  if (typeof id === "string" && newest(prefixOf(id)) === undefined) learnId(id, agent_id);
};

const learnId = (id, agent) => {
  if (typeof id !== "string") return;
  if (agent !== undefined && prefixOf(id) === "inv") agentOf.set(id, agent);
  remember(id);
};

const newest = (prefix, isWanted = () => true) => remembered[prefix]?.find(isWanted);

/**
 * An operation that changes or ends what it names gets only what was made on this page, so that no click changes what the reader
 * found there.
 */
const isChange = (described) => ["put", "patch", "delete"].includes(described.method) || isCancel(described);

/** It gets no call that has ended either. */
const isCancel = ({ operation: { operationId } }) => operationId.startsWith("cancel");

/** The ID for a parameter, by the prefix in its pattern. An operation on an invocation needs the agent of that invocation. */
const idFor = ({ schema }, described) => {
  const isWanted = isChange(described) ? (id) => made.has(id) && !(isCancel(described) && ended.has(id)) : undefined;
  const prefix = /^\^([a-z]+)_/.exec(schema?.pattern ?? "")?.[1];
  const needsInvocation = described.operation.parameters.some(({ name }) => name === "inv_id");
  return (prefix === "agt" && needsInvocation && agentOf.get(newest("inv", isWanted))) || newest(prefix, isWanted);
};

const withNewest = (text) => text.replaceAll(ID, (id, prefix) => (exampleIds.has(id) && newest(prefix)) || id);

/** A body with the newest IDs in place of those of the example. An ID that the reader typed stays. */
const filledBody = (operation, body) => {
  const last = filledBodies.get(operation);
  const before = body === last?.after ? last.before : body;
  const after = withNewest(before);
  filledBodies.set(operation, { before, after });
  return after;
};

/** What stands in the parameters that the page has filled in. */
const filledParameters = new Map();

const fillParameter = ({ path, method }, { name, in: place }, value, system) => {
  const key = [method, path, name].join(" ");
  if ((filledParameters.get(key) ?? "") === value) return;
  filledParameters.set(key, value);
  system.specActions.changeParam([path, method], name, place, value);
};

const fillBody = (described, system) => {
  const { path, method, operation } = described;
  const value = operation.requestBody && system.oas3Selectors.requestBodyValue(path, method);
  if (typeof value !== "string" || replacesOne(described, system)) return;
  const filled = filledBody([method, path].join(" "), value);
  if (filled !== value) system.oas3Actions.setRequestBodyValue({ value: filled, pathMethod: [path, method] });
};

/** Fills in what is known. What the reader typed into a parameter stays: the page keeps that apart. */
const fillIn = (system, session) => {
  for (const described of operationsOf(system)) {
    for (const parameter of described.operation.parameters ?? []) {
      const isSession = parameter.name === SESSION_HEADER && session !== undefined;
      if (isSession) fillParameter(described, parameter, session, system);
      if (parameter.in === "path") fillParameter(described, parameter, idFor(parameter, described) ?? "", system);
    }
    fillBody(described, system);
  }
};

/** Whether the operation replaces something of which there is one, such as the policy, and which can be read at its path. */
const replacesOne = ({ path, method }, system) =>
  ["put", "patch"].includes(method) &&
  !path.includes("{") &&
  system.specSelectors.specJson().hasIn(["paths", path, "get"]);

const LOOK_UP_MS_MAX = 30_000;
/** An operation opens after so long at the latest. What the gateway has for it is put in when it comes. */
const OPENS_AFTER_MS = 2_000;
const tokenOf = (system) => system.authSelectors.authorized().getIn(["bearer", "value"]);

/** What the gateway has at the path for the reader's token: null if nothing, and undefined if that can't be told. */
const whatIsAt = async (path, system) => {
  const asked = tokenOf(system);
  if (asked === undefined) return;
  const headers = { authorization: `Bearer ${asked}` };
  const found = await fetch(path, { headers, signal: AbortSignal.timeout(LOOK_UP_MS_MAX) })
    .then((response) => (response.status === 404 ? null : response.ok ? response.json() : undefined))
    .catch(() => undefined);
  return tokenOf(system) === asked ? found : undefined;
};

/** Where the IDs of each kind are listed, the newest first. */
const LISTS = { agt: "/v1/agents?limit=100", cred: "/v1/credentials", inv: "/v1/invocations?limit=100" };
/** The kinds of IDs that were remembered before the reader gave another token, perhaps that of another tenant. */
const unsure = new Set();

/** Looks up the IDs that the operation needs and that are not known, and forgets those that are not there for this token. */
const lookUpIds = async (described, system) => {
  const { parameters, requestBody } = described.operation;
  const named = JSON.stringify([parameters, requestBody]).match(/\b(?:agt|cred|inv)(?=_)/g) ?? [];
  const isNeeded = (prefix) =>
    isCancel(described) ? prefix === "inv" : newest(prefix) === undefined && !isChange(described);
  const isWanted = (prefix) => unsure.has(prefix) || isNeeded(prefix);
  const lookUp = async (prefix) => {
    const found = await whatIsAt(LISTS[prefix], system);
    // IDs that may be another tenant's go, also where nobody can tell.
    if (!found && !unsure.has(prefix)) return;
    learnEnds(listIn(found));
    if (unsure.delete(prefix)) {
      const ids = new Set(listIn(found).map(({ id }) => id));
      for (const id of remembered[prefix].filter((id) => !ids.has(id))) forget(id);
    }
    learnFirst(listIn(found));
  };
  await Promise.all([...new Set(named)].filter(isWanted).map(lookUp));
  fillIn(system);
};

/** What stands in place of the example in operations that replace something, by their paths. */
const offered = new Map();

/** The example of an operation's body; null until the operation has been opened. */
const exampleOf = (system, path, method) => system.oas3Selectors.selectDefaultRequestBodyValue(path, method);

/** The fields of `current` that the body of the operation has; null when it lacks one that the body must have. */
const bodyOf = (current, { operation }, system) => {
  const { $ref } = operation.requestBody.content["application/json"].schema;
  const { properties, required = [] } = system.specSelectors.specJson().toJS().components.schemas[
    $ref.split("/").at(-1)
  ];
  if (!required.every((name) => name in current)) return null;
  return Object.fromEntries(Object.entries(current).filter(([name]) => name in properties));
};

/**
 * Puts what is there into the body of an operation that would replace it, unless the reader has written a body, so
 * that executing it as it stands changes nothing. If there is nothing yet the example stands there, and as long as nobody knows,
 * an empty body, which is refused.
 */
const offerCurrent = async (described, system) => {
  const { path, method } = described;
  const isOurs = () => {
    const shown = system.oas3Selectors.requestBodyValue(path, method);
    return !shown || shown === offered.get(path) || shown === exampleOf(system, path, method);
  };
  const offer = (body) => {
    if (!isOurs()) return;
    if (body === null) offered.delete(path);
    else offered.set(path, JSON.stringify(body ?? {}, null, 2));
    const value = offered.get(path) ?? exampleOf(system, path, method);
    if (value) system.oas3Actions.setRequestBodyValue({ value, pathMethod: [path, method] });
  };
  const asked = tokenOf(system);
  if (asked === undefined) return;
  offer();
  const current = await whatIsAt(path, system);
  if (tokenOf(system) === asked) offer(current && bodyOf(current, described, system));
};

/** Puts into an operation that is open, or about to be, what the gateway has for it. */
const prepare = (described, system) =>
  replacesOne(described, system) ? offerCurrent(described, system) : lookUpIds(described, system);

const isOpen = ({ operation: { tags, operationId } }, system) =>
  [...tags, CLEAN_UP].some((tag) => system.layoutSelectors.isShown(["operations", tag, operationId], false));

/**
 * The part of the document below `path`, with the schemas in place of their references. The library does so by
 * preparing the whole document for each operation that is opened, which takes more than a second on a busy machine (measured).
 */
const resolveSubtree = async ({ components, ...document }, path, { baseDoc }) => {
  const resolved = (value) => {
    if (Array.isArray(value)) return value.map(resolved);
    if (typeof value !== "object" || value === null) return value;
    const { $ref, ...own } = value;
    const shown = Object.fromEntries(Object.entries(own).map(([key, inner]) => [key, resolved(inner)]));
    if (typeof $ref !== "string") return shown;
    return { ...resolved(components.schemas[$ref.split("/").at(-1)]), ...shown, $$ref: baseDoc + $ref };
  };
  return { spec: resolved(path.reduce((part, key) => part?.[key], { components, ...document })), errors: [] };
};

/** Components of the library that it would render anew, each of them, whenever anything on the page changes. */
const rendersLess = {
  /** A closed operation shows its summary alone. */
  OperationContainer: (Operation) =>
    class extends Operation {
      shouldComponentUpdate(next) {
        const shown = ["isShown", "isAuthorized", "response"];
        return this.props.isShown || shown.some((name) => next[name] !== this.props[name]);
      }
    },
  Markdown: (Markdown, { React }) => React.memo(Markdown, (before, after) => before.source === after.source),
};

/** Components of the library, changed so that no control stands within another one and no level of headings is left out. */
const wrapComponents = {
  /** Its link stood within the button of the operation. The address of the page still follows what is opened. */
  OperationSummaryPath:
    (Path, { React }) =>
    (props) =>
      React.createElement(Path, { ...props, operationProps: props.operationProps.set("isDeepLinkingEnabled", false) }),
  operations:
    (Operations, { React: { createElement: element, Fragment } }) =>
    (props) =>
      element(Fragment, null, element("h2", { className: "level" }, "Operations"), element(Operations, props)),
  /** Its dialog offers what can be given to it: a token, and no client certificate. */
  AuthorizeBtnContainer:
    (Button, { React: { createElement: element, Fragment } }) =>
    ({ authSelectors, ...props }) => {
      const isGiven = (definition) => definition.every((scheme) => scheme.get("type") !== "mutualTLS");
      const definitionsToAuthorize = () => authSelectors.definitionsToAuthorize().filter(isGiven);
      const own = { ...props, authSelectors: { ...authSelectors, definitionsToAuthorize } };
      return element(Fragment, null, element("h2", { className: "level" }, "Authorization"), element(Button, own));
    },
  MutualTLSAuth:
    (_, { React: { createElement: element } }) =>
    ({ schema }) =>
      element("div", null, element("h4", null, "Client certificate"), element("p", null, schema.get("description"))),
};

/** The highlighter makes an element of each word. */
const HIGHLIGHTED_LETTERS_MAX = 20_000;
const SHOWN_LETTERS_MAX = 100_000;
/** Of these a browser takes seconds to lay out: combining marks, scripts whose letters change their shape, emoji. */
const SLOW_LETTER = /\p{M}|[^\0-\u02ff\u0370-\u052f\u2010-\u9fff\uac00-\ud7a3]/u;
const SLOW_LETTERS_MAX = 20_000;
const shownMax = (text) => (SLOW_LETTER.test(text.slice(0, SHOWN_LETTERS_MAX)) ? SLOW_LETTERS_MAX : SHOWN_LETTERS_MAX);
const DEPTH_MAX = 100;

const isShallow = (value, levels) =>
  typeof value !== "object" ||
  (levels > 0 && Object.values(value ?? {}).every((inner) => isShallow(inner, levels - 1)));

/** Whether the text is JSON that can be laid out, with a line for each value, and highlighted. */
const isLightJson = (text) => {
  if (text.length > HIGHLIGHTED_LETTERS_MAX) return false;
  try {
    return isShallow(JSON.parse(text), DEPTH_MAX);
  } catch {
    return false;
  }
};

const PICTURE = { alt: "Response body" };
const CONTROLS = { controls: true, "aria-label": "Response body" };
/** What shows bytes, by the first word of their media type. */
const PLAYERS = new Map([
  ["image", ["img", PICTURE]],
  ["audio", ["audio", CONTROLS]],
  ["video", ["video", CONTROLS]],
]);
const playerOf = ({ type }) => PLAYERS.get(type.split("/")[0]);

/** The media type of a picture or sound that the page shows, and of anything else one that no browser runs. */
const safeTypeOf = (bytes) => {
  const [type] = bytes.type.split(";");
  return playerOf(bytes) && /^[\w./+-]+$/.test(type) && !/svg|ml/.test(type) ? type : "application/octet-stream";
};

/** The extensions of common files: a list, so that no agent chooses the extension of a program. Others are `.bin`. */
const EXTENSIONS = new Map([
  ["application/gzip", ".gz"],
  ["application/pdf", ".pdf"],
  ["application/zip", ".zip"],
  ["audio/mpeg", ".mp3"],
  ["audio/ogg", ".ogg"],
  ["audio/wav", ".wav"],
  ["image/gif", ".gif"],
  ["image/jpeg", ".jpg"],
  ["image/png", ".png"],
  ["image/webp", ".webp"],
  ["video/mp4", ".mp4"],
  ["video/webm", ".webm"],
]);

/** Shows bytes that are no text where the browser can, and offers them as a file. */
const bytesViewer =
  ({ createElement: element, useEffect, useMemo }) =>
  ({ bytes }) => {
    const safe = useMemo(() => bytes.slice(0, bytes.size, safeTypeOf(bytes)), [bytes]);
    // A document that somebody opens at this URL would have the origin of this page.
    const src = useMemo(() => URL.createObjectURL(safe), [safe]);
    useEffect(() => () => URL.revokeObjectURL(src), [src]);
    const [player, attributes] = playerOf(safe) ?? [];
    // Where the name has no extension the browser adds one by the type, which may be that of a program.
    const download = `response${EXTENSIONS.get(bytes.type.split(";")[0]) ?? ".bin"}`;
    const size = bytes.size.toLocaleString("en", { style: "unit", unit: "byte", unitDisplay: "long" });
    const link = element("a", { href: src, download }, "Download");
    return element(
      "div",
      { className: "bytes" },
      element("h5", null, "Response body"),
      player && element(player, { ...attributes, src }),
      element("p", null, link, ` (${bytes.type || "no content type"}, ${size})`),
    );
  };

/**
 * Components that show short JSON with highlights, and any other text as it came, cut where it is long. The buttons beside
 * it copy and download the whole. The library learns neither the headers nor the type of an agent's response, by which it would
 * offer a file at a URL whose scripts have the origin of this page. SVG is text too: a short one can hold the page as a picture.
 */
const plainWhereHeavy = {
  responseBody: (Body, { React }) => {
    const Bytes = bytesViewer(React);
    return (props) => {
      const { content, contentType = "" } = props;
      if (content.size === 0) return null;
      if (content instanceof Blob) return React.createElement(Bytes, { bytes: content });
      const isJson = /json\b/i.test(contentType) && isLightJson(content);
      return React.createElement(Body, { ...props, headers: {}, contentType: isJson ? "application/json" : "" });
    };
  },
  SyntaxHighlighter: (Highlighter, { React, getComponent }) => {
    const { createElement: element, Fragment, memo } = React;
    const Shown = ({ className, children, ...props }) => {
      const { length } = children ?? "";
      if (props.language && length <= HIGHLIGHTED_LETTERS_MAX)
        return element(Highlighter, { ...props, className }, children);
      const Plain = getComponent("PlainTextViewer");
      const most = shownMax(children ?? "");
      if (length <= most) return element(Plain, { className }, children);
      const [shown, all] = [most, length].map((count) => count.toLocaleString("en"));
      const cut = `The first ${shown} of ${all} characters. Download has all of them.`;
      return element(Fragment, null, element("p", null, cut), element(Plain, { className }, children.slice(0, most)));
    };
    const parts = ["children", "className", "language"];
    return memo(Shown, (before, after) => parts.every((name) => before[name] === after[name]));
  },
};

/** What was given to the dialog, with the token alone where the word of the header was pasted along. */
const withoutBearer = ({ bearer, ...others }) =>
  bearer ? { ...others, bearer: { ...bearer, value: bearer.value?.replace(/^\s*(bearer\s+)?/i, "").trim() } } : others;

const Helper = {
  fn: { resolveSubtree },
  wrapComponents: { ...wrapComponents, ...rendersLess, ...plainWhereHeavy },
  statePlugins: {
    layout: {
      wrapActions: {
        show:
          (original, system) =>
          async (thing, isShown = true) => {
            const [, , opened, detail] = [thing].flat();
            const found = operationsOf(system).find(({ operation }) => operation.operationId === opened);
            if (isShown && detail === undefined && found !== undefined) {
              const late = new Promise((resolve) => setTimeout(resolve, OPENS_AFTER_MS));
              await Promise.race([prepare(found, system), late]);
            }
            return original(thing, isShown);
          },
      },
    },
    auth: {
      wrapActions: {
        authorize: (original, system) => (given) => {
          const result = original(withoutBearer(given));
          for (const prefix of Object.keys(LISTS)) unsure.add(prefix);
          for (const described of operationsOf(system)) if (isOpen(described, system)) void prepare(described, system);
          return result;
        },
      },
    },
    spec: {
      wrapSelectors: {
        allowTryItOutFor: () => isTryable,
        taggedOperations:
          (original) =>
          (...given) =>
            deletionsLast(original(...given)),
      },
      wrapActions: {
        updateJsonSpec: (original) => (document) => {
          for (const [id] of JSON.stringify(document).matchAll(ID)) exampleIds.add(id);
          return original(document);
        },
        setResponse: (original, system) => (path, method, response) => {
          const result = original(path, method, response);
          tell(response);
          if (response.ok) {
            learn(response, method, path);
            fillIn(system, response.headers[SESSION_HEADER.toLowerCase()]);
          }
          return result;
        },
      },
    },
    oas3: {
      wrapActions: {
        setRequestBodyValue:
          (original, system) =>
          ({ value, pathMethod }) => {
            const [path, method] = pathMethod;
            // The example of a replacement names nothing that works. Else a click would set a facilitator that can't be removed.
            const isFilled = typeof value === "string" && !replacesOne({ path, method }, system);
            const text = isFilled ? filledBody([method, path].join(" "), value) : value;
            // The library puts the example into each operation that is opened.
            const isOffered = offered.has(path) && text === exampleOf(system, path, method);
            return original({ value: isOffered ? offered.get(path) : text, pathMethod });
          },
      },
    },
  },
};

/**
 * Asks as the library does, and gives it no text but bytes: it would read every text that is not JSON as YAML, and copy what it
 * has read level by level, either of which can hold the page for minutes.
 */
const fetchBytes = async (url, options) => {
  const response = await fetch(url, options);
  return Object.assign(response, { text: () => response.blob() });
};
const askForBytes = (request) => (request.loadSpec ? request : Object.assign(request, { userFetch: fetchBytes }));

/** Longer texts are offered as files: a browser has no text of 512 MiB, and needs three times as much memory as their bytes. */
const TEXT_BYTES_MAX = 32 * 1024 * 1024;
const TEXT_TYPE = /(?:jsonl?|xml|yaml|text)\b/;
const CONTROL_CHARACTER = /[^\P{Cc}\s]/u;

/** The text of bytes whose type says that they are text, or that read as text where the type says nothing of it; else null. */
const textIn = async (bytes) => {
  if (bytes.size > TEXT_BYTES_MAX) return null;
  if (TEXT_TYPE.test(bytes.type)) return bytes.text();
  if (playerOf(bytes)) return null;
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(await bytes.arrayBuffer());
    return CONTROL_CHARACTER.test(text) ? null : text;
  } catch {
    return null;
  }
};

const textOfBytes = async (response) => {
  const { data, body: _body, obj: _obj, parseError: _parseError, ...rest } = response;
  const text = data instanceof Blob ? await textIn(data) : null;
  return text === null ? response : { ...rest, data: text, text };
};

/** Attributes that the library leaves out, by which screen readers tell fields and parts of the page apart. */
const ATTRIBUTES = {
  "#servers": () => ({ "aria-label": "Server" }),
  "#auth-bearer-value": () => ({ "aria-label": "Value: a token" }),
  ".examples-select-element": () => ({ "aria-label": "Example" }),
  ".content-type": () => ({ "aria-label": "Media type" }),
  "textarea.body-param__text": () => ({ "aria-label": "Request body" }),
  "tr[data-param-name] select": (field) => ({ "aria-label": field.closest("tr").dataset.paramName }),
  "input[data-variable]": (field) => ({ "aria-label": field.dataset.variable }),
  ".information-container": () => ({ role: "region", "aria-label": "About this API" }),
  ".scheme-container": () => ({ role: "region", "aria-label": "Server and authorization" }),
  ".responses-table[id]": (table) => ({ "aria-label": `${table.closest(".opblock").id} responses` }),
  ".modal-ux": () => ({ role: "dialog", "aria-modal": "true", "aria-label": "Available authorizations" }),
  ".view-line-link": () => ({ role: "group" }),
  ".modal-ux .close-modal": () => ({ "aria-label": "Close" }),
  ".auth-btn-wrapper .btn": (button) => ({ "aria-label": button.textContent }),
  ".auth-container h6": () => ({ "aria-level": "5" }),
};

/** Lets the keyboard scroll what is longer or wider than its box, and pass over the rest. */
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollHeight > target.clientHeight || target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});

const nameParts = () => {
  for (const [selector, attributesOf] of Object.entries(ATTRIBUTES)) {
    for (const element of document.querySelectorAll(selector)) {
      for (const [name, value] of Object.entries(attributesOf(element))) element.setAttribute(name, value);
    }
  }
  for (const text of document.querySelectorAll("#swagger-ui pre")) sizes.observe(text);
  keepFocus(document.querySelector(".dialog-ux") !== null);
  regainFocus();
};

/** What has the focus, the operation or dialog that it is in, and whether it lost the focus because it was disabled. */
const focus = { on: null, within: null, wasDisabled: false };
document.addEventListener("focusin", ({ target }) =>
  Object.assign(focus, { on: target, within: target.closest(".opblock, .modal-ux"), wasDisabled: false }),
);
document.addEventListener("focusout", ({ target }) => Object.assign(focus, { wasDisabled: target.disabled }));

/** Gives the focus to the next button where the library has removed what had it, or has disabled it as it does Execute. */
const regainFocus = () => {
  const { on, within, wasDisabled } = focus;
  if (document.activeElement !== document.body || !(wasDisabled || on?.isConnected === false)) return;
  const next = within?.querySelector(".execute") ?? within?.querySelector(".try-out__btn, .auth-btn-wrapper .btn");
  next?.focus({ preventScroll: true });
};

const SAID_AFTER_MS = 100;

/** Has screen readers say that a response has come, also where it is the same as the last one. */
const tell = ({ status, err }) => {
  const said = document.getElementById("said");
  const code = status ?? err?.status;
  said.textContent = "";
  setTimeout(() => Object.assign(said, { textContent: code ? `Response ${code}` : "No response" }), SAID_AFTER_MS);
};

/** What the dialog covers, and the button that has opened it. */
const COVERED = ".information-container, .schemes-server-container, .auth-wrapper > .authorize, #operations";
const OPENERS = ".auth-wrapper > .authorize, .authorization__btn";
const dialog = { isOpen: false, opener: null };
document.addEventListener(
  "click",
  ({ target }) => Object.assign(dialog, { opener: target.closest(OPENERS) ?? dialog.opener }),
  true,
);

/** Keeps the focus within the dialog while it is open, and gives it back to what has opened it. */
const keepFocus = (isOpen) => {
  for (const part of document.querySelectorAll(COVERED)) part.inert = isOpen;
  if (dialog.isOpen && !isOpen) dialog.opener?.focus();
  dialog.isOpen = isOpen;
};
new MutationObserver(nameParts).observe(document.getElementById("swagger-ui"), { childList: true, subtree: true });

SwaggerUIBundle({
  url: "swagger/json",
  dom_id: "#swagger-ui",
  // Keeps the page from sending the document's address to a public validator.
  validatorUrl: null,
  deepLinking: true,
  displayRequestDuration: true,
  tryItOutEnabled: true,
  showCommonExtensions: true,
  // A token stays in the page's memory: the browser's storage would keep it after the page is closed.
  persistAuthorization: false,
  plugins: [Helper],
  requestInterceptor: askForBytes,
  responseInterceptor: textOfBytes,
});
